"""Ranking metrics of one candidate list, exact under ties.

Documents with equal scores have no order, so every metric here is its expected value over all orders
of the tied documents (McSherry and Najork, "Computing information retrieval performance measures
efficiently in the presence of tied scores", ECIR 2008). A model that scores everything alike gets
chance level, not a lucky or an unlucky order. A score that is not a number ranks last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

# A block of documents with one score: how many documents stand before it, and the block's own labels.
_Block = tuple[int, list[float]]


def ndcg_at_k(scores: Sequence[float], labels: Sequence[float], k: int) -> float:
    """Normalised discounted cumulative gain: gain = label (linear), discount = 1 / log2(rank + 1).

    Raises ValueError without a positive label, here as in the functions below.

    Example:
        >>> ndcg_at_k([0.9, 0.1], [1.0, 0.0], 10)
        1.0
    """
    gained = 0.0
    for before, block in _blocks(scores, labels):
        mean = sum(block) / len(block)
        gained += mean * sum(_discount(rank) for rank in range(before + 1, before + len(block) + 1) if rank <= k)
    best = sorted(labels, reverse=True)[:k]
    return gained / sum(label * _discount(rank) for rank, label in enumerate(best, start=1))


def mrr_at_k(scores: Sequence[float], labels: Sequence[float], k: int) -> float:
    """1 / rank of the first positive document, 0 when that rank is above `k`.

    Example:
        >>> mrr_at_k([0.1, 0.9], [1.0, 0.0], 10)
        0.5
    """
    for before, block in _blocks(scores, labels):
        positives = sum(label > 0 for label in block)
        if positives:
            orders = math.comb(len(block), positives)
            return sum(
                # Orders of the block whose first positive stands at `place`: the other positives lie behind it.
                math.comb(len(block) - place, positives - 1) / orders / (before + place)
                for place in range(1, len(block) - positives + 2)
                if before + place <= k
            )
    raise AssertionError("_blocks refuses lists without a positive")


def recall_at_k(scores: Sequence[float], labels: Sequence[float], k: int) -> float:
    """Share of the positive documents that are among the first `k`.

    Example:
        >>> recall_at_k([0.5, 0.5], [1.0, 0.0], 1)
        0.5
    """
    found = 0.0
    for before, block in _blocks(scores, labels):
        places = min(len(block), max(0, k - before))
        found += sum(label > 0 for label in block) * places / len(block)
    return found / sum(label > 0 for label in labels)


def _discount(rank: int) -> float:
    return 1.0 / math.log2(rank + 1)


def _blocks(scores: Sequence[float], labels: Sequence[float]) -> Iterator[_Block]:
    if len(scores) != len(labels):
        raise ValueError(f"{len(scores)} scores for {len(labels)} labels")
    if not any(label > 0 for label in labels):
        raise ValueError("a ranking metric needs at least one positive label")
    numbers = [-math.inf if math.isnan(score) else score for score in scores]
    ranked = sorted(zip(numbers, labels, strict=True), key=lambda pair: -pair[0])
    before = 0
    for _, tied in groupby(ranked, key=lambda pair: pair[0]):
        block = [label for _, label in tied]
        yield before, block
        before += len(block)
