"""Libraries that others import merely because they are installed: seconds of every start, for nothing."""

from __future__ import annotations

import sys
from typing import Any

from launcher.spec import RunPlan

# DeepSpeed's autotuner imports mlflow (autotuning/autotuner.py), peft bitsandbytes (helpers.py, tuners/lora/bnb.py)
# and with it torch's compiler: a quarter of the time until a rank has imported everything.
AUTOTUNER, FOUR_BIT = "mlflow", "bitsandbytes"


def spare_imports(plan: RunPlan, modules: dict[str, Any] = sys.modules) -> None:
    """Let those that this run has no use for seem not installed; to be called before torch is imported."""
    needs_bits = plan.config.tune.name == "qlora" or plan.config.optim.name == "adamw8bit"
    for name in (AUTOTUNER,) if needs_bits else (AUTOTUNER, FOUR_BIT):
        modules.setdefault(name, None)
