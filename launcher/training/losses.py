"""Reranking losses: pure functions from scores to one sum, and the count that sum is divided by.

A loss returns the *sum* over its units and never a mean: the training loop divides by the count of the whole
global batch, so the value does not depend on ranks or micro-batches. D documents, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from launcher.spec import LossConfig


def pointwise_loss(scores: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Binary cross-entropy of each document's score.

    Computes: sum over documents of -y log sigmoid(s) * positive_weight - (1 - y) log sigmoid(-s). With
    s = z_yes - z_no this is the cross-entropy over the two answer tokens, the published objective.
    Inputs and labels: scores [D] float32, labels [D] in {0, 1}; `group` is not used.
    Reduction over ranks: sum; the unit counted is the document.
    Prefer another when: only the order inside a group matters (listwise).
    Source: Qwen3 Embedding report, arXiv 2506.05176, reranker objective.
    """
    weight = torch.full_like(scores, config.positive_weight)
    return F.binary_cross_entropy_with_logits(scores, labels, pos_weight=weight, reduction="sum")


def listwise_loss(scores: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Softmax cross-entropy over the documents of each group.

    Computes: sum over groups of -sum_d p_d log softmax(s / temperature)_d with p uniform over the positives.
    Inputs and labels: scores [D] float32, labels [D] in {0, 1}, group [D] ids; a group is whole in one call.
    Reduction over ranks: sum; the unit counted is the group.
    Prefer another when: the score itself must be a calibrated probability (pointwise), or groups have no negative.
    Source: Cao et al. 2007, Learning to Rank (ListNet, top one).
    """
    total = scores.sum() * 0.0
    for members in _members(group):
        log_p = F.log_softmax(scores[members] / config.temperature, dim=0)
        target = labels[members] / labels[members].sum()
        total = total - (target * log_p).sum()
    return total


def _members(group: torch.Tensor) -> list[torch.Tensor]:
    _, counts = torch.unique_consecutive(group, return_counts=True)
    rows = torch.arange(len(group), device=group.device)
    return list(torch.split(rows, counts.tolist()))


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, the unit its sum is divided by, and whether a group may be split over micro-batches."""

    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LossConfig], torch.Tensor]
    per_document: bool

    def count(self, documents: int, groups: int) -> int:
        """Units in so many documents and groups."""
        return documents if self.per_document else groups


LOSSES = {
    "pointwise": Loss(pointwise_loss, per_document=True),
    "listwise": Loss(listwise_loss, per_document=False),
}
