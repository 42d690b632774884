"""Lines of a run's files as flat names and numbers, the form in which trackers take them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.planning.secrets import masked
from launcher.running.journal import Line, inside

STEP_NAMES = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "epoch": "train/epoch",
    "skipped": "train/skipped_steps",
    "queries_per_s": "speed/queries_per_s",
    "tokens_per_s": "speed/tokens_per_s",
    "micro_steps": "speed/micro_steps",
    "step_s": "time/step_s",
    "data_wait_s": "time/data_wait_s",
    "forward_s": "time/forward_s",
    "backward_s": "time/backward_s",
    "optimizer_s": "time/optimizer_s",
    "memory_gib": "memory/allocated_gib",
    "memory_reserved_gib": "memory/reserved_gib",
}
GPU_NAMES = ("util_percent", "memory_used_gib", "power_w", "temperature_c", "sm_clock_mhz")
# Of the plan, beside what was asked: what the launcher decided.
DECIDED = ("version", "device", "gpu_kind", "precision", "attention", "checkpointed_layers", "lr", "warmup_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Numbers of one step; a `restart` has none, and says that all steps after `step` are taken again."""

    step: int
    time: float  # seconds since the epoch, when it was measured
    values: Mapping[str, float]
    restart: bool = False


def of_step(line: Line) -> dict[str, float]:
    """The numbers of a training step."""
    return dict(_numbers({name: line.get(key) for key, name in STEP_NAMES.items()}))


def of_eval(line: Line) -> dict[str, float]:
    """The metrics of an evaluation."""
    return dict(_numbers({key: value for key, value in line.items() if key.startswith("eval/")}))


def of_samples(samples: Sequence[Line]) -> dict[str, float]:
    """What the monitors saw since the last step: the mean of each number by host and GPU, of memory the most."""
    seen: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in _numbers(_of_sample(sample)):
            seen.setdefault(name, []).append(value)
    return {
        name: max(values) if name.endswith("memory_used_gib") else sum(values) / len(values)
        for name, values in seen.items()
    }


def _of_sample(sample: Line) -> dict[str, Any]:
    root = f"monitor/{sample.get('host')}"
    found = {
        f"{root}/cpu_percent": sample.get("cpu_percent"),
        f"{root}/memory_used_gib": inside(sample, "memory", "used_gib"),
    }
    for gpu in sample.get("gpus") or []:
        found |= {f"{root}/gpu{gpu.get('index')}/{name}": gpu.get(name) for name in GPU_NAMES}
    for kind in ("network", "infiniband"):
        for port, counts in (sample.get(kind) or {}).items():
            found |= {f"{root}/{port}/{name}": counts.get(name) for name in ("rx_mib_s", "tx_mib_s")}
    return found


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield name, float(value)


def config_of(plan: Line) -> dict[str, Any]:
    """What was asked and what was decided, for comparing runs: without the model's table, secrets masked."""
    config = dict(plan.get("config") or {})
    config["model"] = {key: value for key, value in (config.get("model") or {}).items() if key != "arch"}
    if isinstance(given := inside(config, "env", "set"), dict):
        config["env"] = {**config["env"], "set": masked(given)}
    decided = {key: plan[key] for key in DECIDED if plan.get(key) is not None}
    for key in ("parameters", "trainable"):
        if isinstance(parts := plan.get(key), dict):
            decided[key] = sum(parts.values())
    decided["ranks"] = sum(len(host.get("gpus") or ()) for host in plan.get("hosts") or ())
    return {**config, "plan": decided}


def flat(config: Mapping[str, Any], root: str = "") -> dict[str, bool | int | float | str]:
    """Nested mappings as dotted names; what is no scalar becomes text, and nothing stays nothing.

    Example:
        >>> flat({"optim": {"lr": 0.1, "betas": [0.9, 0.99], "warmup_steps": None}})
        {'optim.lr': 0.1, 'optim.betas': '[0.9, 0.99]'}
    """
    found: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{root}{key}.")
        elif value is not None:
            found[f"{root}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found
