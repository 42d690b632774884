"""Configurations and facts for tests of the planner: written down, so that no machine shows through."""

from __future__ import annotations

import functools
from datetime import datetime, timezone
from typing import Any

from launcher.planning.config import read_config
from launcher.planning.facts import Facts, LocalGpu, TextFile
from launcher.planning.plan import make_plan
from launcher.planning.setting import Setting
from launcher.planning.shapes import read_shape
from launcher.resources import hostfiles_dir
from launcher.running.facts import zero_files
from launcher.spec import RunConfig, RunPlan

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
GIB = 2**30
DIGITS = {"train_rows": 6400, "eval_rows": 256}


@functools.cache
def compose(*words: str) -> RunConfig:
    """The configuration that a command line asks for."""
    return read_config(list(words)).config


def known(config: RunConfig, **facts: Any) -> Facts:
    """Facts of an invented machine: two cores, main memory as machines without and with GPUs have it."""
    files = zero_files()
    machine: dict[str, Any] = {
        "cwd": "/home/me",
        "hostname": "desk",
        "cpu_count": 2,
        "ram_bytes": (2048 if facts.get("gpus") else 16) * GIB,
        "disk_free_bytes": 500 * GIB,
        "run_root": "/home/me/runs",
        "zero_file": files.get(config.zero.file),
        "zero_files": files,
        **(DIGITS if config.dataset.name == "digits" else {"train_rows": 1000}),
    }
    return Facts(**{**machine, **facts})


def hostfile(name: str) -> TextFile:
    """A hostfile that ships with the package."""
    return TextFile(path=f"hostfiles/{name}", text=(hostfiles_dir() / name).read_text())


def gpus(count: int, name: str = "NVIDIA H200", gib: float = 140.4, capability: Any = (9, 0)) -> Any:
    """GPUs of one machine."""
    return tuple(LocalGpu(index=n, name=name, memory_bytes=int(gib * GIB), capability=capability) for n in range(count))


def plan(*words: str, **facts: Any) -> RunPlan:
    """The plan of a command line on the invented machine."""
    config = compose(*words)
    return make_plan(config, known(config, **facts), now=NOW)


def setting_of(plan: RunPlan) -> Setting:
    """What the planner foretells the memory and speed of a plan from."""
    return Setting(
        config=plan.config,
        shape=read_shape(plan.config.model, plan.arch),
        deepspeed=plan.deepspeed,
        precision=plan.precision,
        device=plan.device,
        gpu_kind=plan.gpu_kind,
        capability=plan.capability,
        world=plan.world_size,
        slots=max(host.slots for host in plan.hosts),
        checkpointed_layers=plan.checkpointed_layers,
        attention=plan.attention,
    )
