"""Learning rate and data order: pure functions of the step, so that resuming needs a number and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from launcher.arithmetic import steps_per_epoch, total_steps
from launcher.spec import OptimConfig, TrainConfig


def learning_rate(step: int, *, total_steps: int, peak: float, warmup_steps: int, optim: OptimConfig) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up to `peak`, then the schedule down to its floor.

    Examples:
        >>> o = OptimConfig(schedule="linear")
        >>> [learning_rate(s, total_steps=6, peak=1.0, warmup_steps=2, optim=o) for s in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    shapes = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))),
    }
    floor = optim.min_lr_ratio
    return peak * (floor + (1.0 - floor) * shapes[optim.schedule])


@dataclass(frozen=True, slots=True)
class Order:
    """Which rows each global batch holds: a pure function of (seed, epoch, batch), the same on any number of ranks."""

    rows: int
    global_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Batches an epoch, the last one maybe smaller."""
        return steps_per_epoch(self.rows, self.global_size)

    def total_steps(self, train: TrainConfig) -> int:
        """Optimizer steps of the whole run."""
        return total_steps(train, self.steps_per_epoch)

    def batch(self, step: int) -> np.ndarray:
        """Row numbers of optimizer step `step` (from 0)."""
        epoch, k = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return order[k * self.global_size : (k + 1) * self.global_size]
