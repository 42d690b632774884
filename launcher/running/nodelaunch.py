"""`python -m launcher.running.nodelaunch ...` is `python -m deepspeed.launcher.launch ...`, seconds sooner.

DeepSpeed's node launcher starts processes and waits for them, yet importing it imports torch and all of deepspeed.
Here its own file runs (launcher/launch.py of 0.19.8) with stand-ins for the three modules that it takes something from;
`tests/test_nodelaunch.py` holds their answers to those of the real ones.
"""

from __future__ import annotations

import importlib.util
import logging
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from types import ModuleType
from typing import Any

LAUNCH = "deepspeed.launcher.launch"
FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


class Accelerator:
    """What a node launcher asks of CUDA's and of the CPU's accelerator, which answer alike."""

    def visible_devices_envs(self) -> list[str]:
        """Variables that say which devices a rank sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Let the ranks see these devices, which they find by their local rank."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))


def stand_ins() -> dict[str, ModuleType]:
    """The modules that DeepSpeed's node launcher imports, without what they import; none when it is not installed."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.submodule_search_locations is None:
        return {}
    logger = logging.getLogger("DeepSpeed")
    logger.propagate = False
    told = logging.StreamHandler(sys.stdout)
    told.setFormatter(logging.Formatter(FORMAT))
    logger.handlers[:] = [told]
    return {
        "deepspeed": _module("deepspeed", __path__=list(found.submodule_search_locations), __version__=""),
        "deepspeed.accelerator": _module("deepspeed.accelerator", get_accelerator=Accelerator),
        "deepspeed.utils": _module(
            "deepspeed.utils",
            logger=logger,
            set_log_level_from_string=lambda level: logger.setLevel(level.upper()),
            get_numactl_cmd=None,  # of --bind_cores_to_rank, which is not used
        ),
    }


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


if __name__ == "__main__":
    sys.modules.update(stand_ins())
    runpy.run_module(LAUNCH, run_name="__main__", alter_sys=True)
