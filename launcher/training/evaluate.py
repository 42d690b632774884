"""Scores of held-out groups -> the numbers of one evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from launcher.training.metrics import mrr_at_k, ndcg_at_k, recall_at_k

Scored = tuple[Sequence[float], Sequence[float]]  # (scores, labels), one entry a document
Records = Mapping[int, Scored]  # group's index in the evaluation set -> its full candidate list

METRICS = {
    "eval/ndcg@10": lambda scores, labels: ndcg_at_k(scores, labels, 10),
    "eval/mrr@10": lambda scores, labels: mrr_at_k(scores, labels, 10),
    "eval/recall@1": lambda scores, labels: recall_at_k(scores, labels, 1),
    "eval/recall@5": lambda scores, labels: recall_at_k(scores, labels, 5),
}


def summarise(records: Records) -> dict[str, float]:
    """Mean of each metric over the groups; groups without a positive document have none and are left out.

    The sum is exact (`math.fsum`), so it does not depend on which rank scored which group.
    Raises ValueError when no group is left.
    """
    ranked = [scored for scored in records.values() if any(label > 0 for label in scored[1])]
    if not ranked:
        raise ValueError("no group with a positive document to evaluate")
    return {name: math.fsum(metric(*scored) for scored in ranked) / len(ranked) for name, metric in METRICS.items()}


def warnings(records: Records) -> list[str]:
    """What is suspicious about these scores: not finite, or equal for all documents of a group."""
    found = []
    broken = [index for index, (scores, _) in records.items() if not all(map(math.isfinite, scores))]
    if broken:
        found.append(
            f"{len(broken)} of {len(records)} groups have a score that is not finite (first: group {broken[0]})"
        )
    flat = [index for index, (scores, _) in records.items() if len(scores) > 1 and len(set(scores)) == 1]
    if flat and len(flat) * 2 >= len(records):
        found.append(
            f"all documents of a group score alike in {len(flat)} of {len(records)} groups: "
            "the model does not tell documents apart"
        )
    return found
