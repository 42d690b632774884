"""Seconds of every start that buy nothing: libraries that others import merely because they are installed, and the
garbage collector's looks at what imports have just made."""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import Any

from launcher.spec import RunPlan

# DeepSpeed's autotuner imports mlflow (autotuning/autotuner.py).
NEVER = ("mlflow",)
# peft imports bitsandbytes (helpers.py, tuners/lora/bnb.py) and with it torch's compiler, transformers scipy for losses
# of object detection (loss/) and scikit-learn for speculative decoding (generation/candidate_generator.py).
WITHOUT_BITS = ("bitsandbytes", "scipy", "sklearn")
# DeepSpeed 0.19.8 asks whether an optimizer is Muon, in modules that have torch compile functions when they are
# imported: a second, for an answer that no optimizer of ours gives.
MUON = "deepspeed.runtime.zero.muon"


class MuonWithAuxAdam:
    """Stands for DeepSpeed's optimizer of this name: no optimizer is one."""


def muon_update(*args: Any, **kwargs: Any) -> None:
    """Stands for the update of that optimizer."""
    raise RuntimeError("no optimizer is Muon")


def spare_imports(plan: RunPlan, modules: dict[str, Any] = sys.modules) -> None:
    """Let those that this run has no use for seem not installed; to be called before torch is imported."""
    for name in NEVER if plan.config.few_bits else (*NEVER, *WITHOUT_BITS):
        modules.setdefault(name, None)
    for name, content in (("muon_optimizer", MuonWithAuxAdam), ("original_muon", muon_update)):
        stand_in = ModuleType(f"{MUON}.{name}")
        vars(stand_in)[content.__name__] = content
        modules.setdefault(stand_in.__name__, stand_in)


def bring_back(modules: dict[str, Any] = sys.modules) -> None:
    """Let them be installed again, for code that is not ours."""
    for name in (*NEVER, *WITHOUT_BITS):
        if name in modules and modules[name] is None:
            del modules[name]


def pause_collection() -> None:
    """Collect no garbage while a rank starts: imports make millions of objects that stay, each looked at many times."""
    gc.disable()


def resume_collection() -> None:
    """Collect garbage again, of what comes from here on: what the start has made is never looked at."""
    gc.freeze()
    gc.enable()
