"""Which documents of a query a step trains on: chosen before anything is decoded. No torch.

A choice is a pure function of (train.seed, epoch, row): fresh each epoch, the same on any number of ranks, and
after a resume. Sizes of groups may differ between rows; every row says its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from launcher.spec import DatasetConfig
from launcher.training.rows import Content, Group, Row

# The last word of a random stream's seed says what it is for. None is 0: NumPy pads a seed with zeros, and
# [seed, epoch] and [seed, epoch, 0] give the same numbers.
CHOICE, HELD_OUT = 1, 2
TRIES = 100  # draws for each random negative; after them the data is taken to have no further document


def choose(row: int, rows: Sequence[Row], dataset: DatasetConfig, *, seed: int, epoch: int) -> Row:
    """What an epoch trains on of a row: up to max_positives and max_negatives of its documents, in their order,
    and `random_negatives` positives of other queries. A chat stays as it is."""
    group = rows[row]
    if not isinstance(group, Group):
        return group
    positives = [d for d, label in enumerate(group.labels) if label > 0]
    negatives = [d for d, label in enumerate(group.labels) if label <= 0]
    places, random = kept(row, positives, negatives, dataset, seed=seed, epoch=epoch)
    chosen = replace(
        group,
        documents=tuple(group.documents[d] for d in places),
        labels=tuple(group.labels[d] for d in places),
        scores=None if group.scores is None else tuple(group.scores[d] for d in places),
    )
    return _with_negatives(chosen, random_negatives(row, rows, dataset.random_negatives, random))


def kept(
    row: int, positives: list[int], negatives: list[int], dataset: DatasetConfig, *, seed: int, epoch: int
) -> tuple[list[int], np.random.Generator]:
    """Which of a row's documents an epoch trains on, and the generator that drew them, for further draws."""
    random = np.random.default_rng([seed, epoch, row, CHOICE])
    return [*_some(positives, dataset.max_positives, random), *_some(negatives, dataset.max_negatives, random)], random


def held_out(rows: Sequence[Row], dataset: DatasetConfig, *, seed: int) -> Sequence[Row]:
    """What is scored of held-out rows: every document. Rows without a negative get `random_negatives` once and for
    all, so that an evaluation means the same at every step."""
    if dataset.random_negatives == 0:
        return rows

    def filled(row: int) -> Row:
        group = rows[row]
        if not isinstance(group, Group) or min(group.labels) <= 0:
            return group
        random = np.random.default_rng([seed, row, HELD_OUT])
        return _with_negatives(group, random_negatives(row, rows, dataset.random_negatives, random))

    return [filled(row) for row in range(len(rows))]


def random_negatives(row: int, rows: Sequence[Row], count: int, random: np.random.Generator) -> list[Content]:
    """Up to `count` different positives of other rows; never a document of this row, nor one of a row that asks
    the same. Fewer when the data has no more."""
    own = rows[row]
    assert isinstance(own, Group)
    taken, found = set(own.documents), list[Content]()
    for _ in range(count * TRIES):
        if len(found) == count:
            break
        other = rows[int(random.integers(len(rows)))]
        if not isinstance(other, Group) or other.query == own.query:
            continue
        positives = [doc for doc, label in zip(other.documents, other.labels, strict=True) if label > 0]
        left = [document for document in positives if document not in taken]
        if left:
            found.append(left[int(random.integers(len(left)))])
            taken.add(found[-1])
    return found


def _some(documents: list[int], most: int | None, random: np.random.Generator) -> list[int]:
    if most is None or len(documents) <= most:
        return documents
    return sorted(random.choice(documents, most, replace=False).tolist())


def _with_negatives(group: Group, documents: list[Content]) -> Group:
    if not documents:
        return group
    labels = (*group.labels, *[0.0] * len(documents))
    # No teacher has scored them, so loss=distill takes none (launcher.planning.consistency).
    return replace(group, documents=(*group.documents, *documents), labels=labels, scores=None)
