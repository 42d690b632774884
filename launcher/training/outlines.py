"""What dividing a batch needs to know of its rows, read off the prepared lengths: nothing is tokenised for it.

So a rank tokenises its own share of a batch and no other, however many ranks there are.

Shapes: N rows, D prompts of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.spec import CostModel, RunPlan
from launcher.training.sampling import kept

if TYPE_CHECKING:
    from launcher.training.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Outline:
    """The size of a row as it is trained on or scored."""

    prefix: int  # tokens that all its prompts share, at the least
    lengths: tuple[int, ...]  # tokens of each prompt, prefix included
    cost: float  # predicted forward FLOPs

    @property
    def tokens(self) -> int:
        """Tokens computed for the row, at the most: the prefix once, then each prompt's own."""
        return self.prefix + sum(length - self.prefix for length in self.lengths)


def make_outline(prefix: int, lengths: tuple[int, ...], visual_cost: float, model: CostModel) -> Outline:
    """An outline with its cost; `visual_cost` is the tower's part of that."""
    tokens, pairs = prefix, prefix**2 / 2
    for length in lengths:
        own = length - prefix
        tokens += own
        pairs += own * (prefix + own / 2)
    return Outline(prefix, lengths, model.token * tokens + model.token_pair * pairs + visual_cost)


@dataclass(frozen=True)
class Outlines:
    """The outlines of all rows of a split, in the order of the data."""

    lengths: Lengths
    rows: np.ndarray  # [rows] their numbers in `lengths`
    plan: RunPlan

    def whole(self, row: int) -> Outline:
        """A row with all of its documents."""
        return self._of(row, np.arange(self.lengths.count[self.rows[row]]))

    def chosen(self, row: int, *, epoch: int) -> Outline:
        """A row as an epoch trains on it.

        Fewer documents may share more than all do; the prefix is then that of all, so that a micro-batch is divided
        as if it had some tokens more than it has.
        """
        number = int(self.rows[row])
        positives, count = int(self.lengths.positives[number]), int(self.lengths.count[number])
        data, seed = self.plan.config.dataset, self.plan.config.train.seed
        relevant, others = list(range(positives)), list(range(positives, count))
        return self._of(row, np.array(kept(row, relevant, others, data, seed=seed, epoch=epoch)[0]))

    def _of(self, row: int, documents: np.ndarray) -> Outline:
        number, lengths, model = int(self.rows[row]), self.lengths, self.plan.cost
        prompts = lengths.starts[number] + documents
        own = tuple(lengths.prompts[prompts].tolist())
        prefix = int(lengths.prefix[number]) if len(own) > 1 else 0
        counts = lengths.counts
        patches = float(counts.base_patches[number]) + float(counts.patches[prompts].sum())
        pairs = float(counts.base_pairs[number]) + float(counts.patch_pairs[prompts].sum())
        return make_outline(prefix, own, model.patch * patches + model.patch_pair * pairs, model)


def outlines_of(rows: Sequence[Any], plan: RunPlan) -> Outlines | None:
    """The outlines of a split as `launcher.training.prepare` gives it.

    None where they are not known before rows are tokenised: rows that nobody counted, documents drawn from other
    rows, films in segments.
    """
    data = plan.config.dataset
    lengths, used = getattr(rows, "lengths", None), getattr(rows, "kept", None)
    if lengths is None or used is None or data.random_negatives or data.video.segment_s is not None:
        return None
    return Outlines(lengths, used, plan)
