"""How many steps a run takes: the plan shows them and training counts them by the same rule. Standard library only."""

from __future__ import annotations

import math

from launcher.spec import OptimConfig, TrainConfig


def steps_per_epoch(rows: int, global_size: int) -> int:
    """Batches an epoch, the last one maybe smaller."""
    return math.ceil(rows / global_size)


def total_steps(train: TrainConfig, per_epoch: int) -> int:
    """Optimizer steps of the whole run; part of an epoch counts up to whole steps.

    Example:
        >>> total_steps(TrainConfig(epochs=1.1), per_epoch=10)
        11
    """
    return train.max_steps or _ceil(train.epochs * per_epoch)


def warmup_steps(optim: OptimConfig, total: int) -> int:
    """Warm-up steps: given, or a ratio of all steps, rounded up."""
    return _ceil(total * optim.warmup_ratio) if optim.warmup_steps is None else optim.warmup_steps


def _ceil(value: float) -> int:
    return math.ceil(round(value, 6))  # 1.1 * 10 is a little more than 11 in binary
