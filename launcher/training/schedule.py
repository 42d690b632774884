"""Learning rate and data order: pure functions of the step, so that resuming needs a number and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.arithmetic import steps_per_epoch, total_steps
from launcher.spec import OptimConfig, RunPlan, TrainConfig
from launcher.training.rows import Row

MIXTURE = 3  # the last word of these streams' seeds; see launcher.training.sampling


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
    """Which rows each global batch holds: a pure function of (seed, epoch, batch), the same on any number of ranks.

    An epoch holds every row once. With `weights`, each source of `sizes` rows (they stand one behind the other)
    gets its share of an epoch of as many rows: a large source goes on where the last epoch ended, a small one is
    begun again.
    """

    rows: int
    global_size: int
    seed: int
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert not self.weights or (len(self.weights) == len(self.sizes) and sum(self.sizes) == self.rows)

    @property
    def steps_per_epoch(self) -> int:
        """Batches an epoch, the last one maybe smaller."""
        return steps_per_epoch(self.rows, self.global_size)

    def total_steps(self, train: TrainConfig) -> int:
        """Optimizer steps of the whole run."""
        return total_steps(train, self.steps_per_epoch)

    def epoch(self, step: int) -> int:
        """Which epoch (from 0) optimizer step `step` belongs to."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> np.ndarray:
        """Row numbers of optimizer step `step` (from 0)."""
        epoch, k = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self._epoch_rows(epoch))
        return order[k * self.global_size : (k + 1) * self.global_size]

    def _epoch_rows(self, epoch: int) -> np.ndarray | int:
        if not self.weights:
            return self.rows
        starts = np.cumsum([0, *self.sizes])
        shares = self._shares()
        return np.concatenate([starts[i] + self._drawn(i, epoch * share, share) for i, share in enumerate(shares)])

    def _shares(self) -> list[int]:
        """Rows of each source in an epoch: whole numbers nearest to the weights that add up to `rows`; a source
        without rows has none, and the others share its part."""
        weights = np.where(np.array(self.sizes) > 0, self.weights, 0.0)
        ends = np.cumsum(weights) / weights.sum() * self.rows
        return np.diff(np.rint(ends).astype(int), prepend=0).tolist()

    def _drawn(self, source: int, first: int, count: int) -> np.ndarray:
        """Rows number first .. first + count - 1 of the endless sequence in which a source is dealt out: every row
        once, in a random order, and again."""
        size = self.sizes[source]
        if not count:
            return np.zeros(0, dtype=int)
        passes = range(first // size, (first + count - 1) // size + 1)
        dealt = [np.random.default_rng([self.seed, turn, source, MIXTURE]).permutation(size) for turn in passes]
        return np.concatenate(dealt)[first % size :][:count]


def make_order(plan: RunPlan, rows: Sequence[Row]) -> Order:
    """The order in which a run takes its training rows, which stand source behind source."""
    dataset, seed = plan.config.dataset, plan.config.train.seed
    if dataset.weights is None:
        return Order(len(rows), plan.batch.global_size, seed)
    sources = np.fromiter((row.source for row in rows), dtype=int, count=len(rows))
    assert (np.diff(sources) >= 0).all()
    sizes = np.bincount(sources, minlength=len(dataset.weights))
    return Order(len(rows), plan.batch.global_size, seed, tuple(sizes.tolist()), tuple(dataset.weights))
