"""Held-out rows through the model, their outputs brought together from all ranks, and the numbers of one evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from launcher.spec import RunConfig
from launcher.training.batching import MicroBatch
from launcher.training.losses import loss_of
from launcher.training.metrics import mrr_at_k, ndcg_at_k, recall_at_k
from launcher.training.rows import Row
from launcher.training.runtime import Rank
from launcher.training.segments import Fusion, fuse_groups
from launcher.training.steps import StepMaker, scoring_batches


class Scored(NamedTuple):
    """What the model made of one row, one entry a document (or a segment of one) in the row's order."""

    scores: Sequence[Any]  # a score, or the logits of all classes
    labels: Sequence[float]
    taught: Sequence[float] = ()  # a teacher's scores
    documents: Sequence[int] = ()  # which document of the row; segments of one video have the same


Records = Mapping[int, Scored]  # row's index in the evaluation set -> its full candidate list


@dataclass
class Outputs:
    """What an evaluation found: rows with their scores, or (task sft) the losses of answer tokens."""

    records: dict[int, Scored] = field(default_factory=dict)
    chats: set[int] = field(default_factory=set)
    losses: list[tuple[float, int]] = field(default_factory=list)  # sums over so many answer tokens

    @property
    def rows(self) -> int:
        """Rows that came through."""
        return len(self.records) or len(self.chats)


METRICS = {
    "eval/ndcg@10": lambda scores, labels: ndcg_at_k(scores, labels, 10),
    "eval/mrr@10": lambda scores, labels: mrr_at_k(scores, labels, 10),
    "eval/recall@1": lambda scores, labels: recall_at_k(scores, labels, 1),
    "eval/recall@5": lambda scores, labels: recall_at_k(scores, labels, 5),
}


def score_rows(
    engine: Any,
    maker: StepMaker,
    rows: Sequence[Row],
    rank: Rank,
    stopping: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
) -> Outputs | None:
    """What the model makes of every row, on every rank; the work is shared and groups may be split.

    Rows are divided some at a time, and the pixels of few micro-batches are in memory. None when `stopping`
    (collective, asked once in such a while) says so. `beat` is called for each batch, as a sign of progress.
    """
    size = 4 * maker.plan.batch.global_size
    batches = scoring_batches(maker, rows, size)
    engine.eval()
    mine = Outputs()
    lines: list[_Line] = []
    with torch.no_grad():
        for first, several in groupby(batches, key=itemgetter(0)):
            if stopping():
                return None
            for _, batch in several:
                beat()
                outputs = engine(batch.to(rank.device))
                if maker.loss.unit == "answer":
                    mine.chats |= {row + first for row in batch.group.tolist()}
                    mine.losses.append((float(outputs.double().sum()), len(outputs)))
                else:
                    lines += _lines(outputs, batch, first)
    found = Outputs(records=_records([line for part in rank.gather(lines) for line in part]))
    for part in rank.gather(mine):
        found.chats |= part.chats
        found.losses += part.losses
    return found


_Line = tuple[int, int, Any, float, float]  # row, document, output, label, a teacher's score


def _lines(outputs: torch.Tensor, batch: MicroBatch, first: int) -> list[_Line]:
    rows = (batch.group + first).tolist()
    targets = batch.labels.tolist(), batch.scores.tolist()
    return list(zip(rows, batch.document.tolist(), outputs.tolist(), *targets, strict=True))


def _records(lines: list[_Line]) -> dict[int, Scored]:
    """Documents in order, whichever rank scored which of them."""
    found: dict[int, list[_Line]] = {}
    for line in sorted(lines, key=lambda line: line[:2]):
        found.setdefault(line[0], []).append(line)
    return {
        row: Scored(
            [line[2] for line in group],
            [line[3] for line in group],
            [line[4] for line in group],
            [line[1] for line in group],
        )
        for row, group in found.items()
    }


class Fused(NamedTuple):
    """Rows with one score a document; the model that made them of segments' scores, or why there is none."""

    records: Records
    model: Fusion | None = None
    note: str | None = None


def fused(records: Records, config: RunConfig) -> Fused:
    """The scores of each document's segments as one, by `dataset.video.fuse`; `records` themselves without segments."""
    video = config.dataset.video
    if all(len(set(row.documents)) == len(row.documents) for row in records.values()):
        return Fused(records)
    groups = {index: _by_document(row) for index, row in records.items()}
    note = None
    try:
        scores, model = fuse_groups(groups, video)
    except ValueError as error:
        note = f"dataset.video.fuse={video.fuse}: {error}; this evaluation took each video's largest score instead"
        scores, model = fuse_groups(groups, replace(video, fuse="max"))
    found = {g: Scored(list(scores[g].values()), [label for _, label in groups[g].values()]) for g in groups}
    return Fused(found, model, note)


def _by_document(row: Scored) -> dict[int, tuple[list[float], float]]:
    found: dict[int, tuple[list[float], float]] = {}
    for document, score, label in zip(row.documents, row.scores, row.labels, strict=True):
        found.setdefault(document, ([], label))[0].append(score)
    return found


def numbers(outputs: Outputs, config: RunConfig) -> dict[str, float]:
    """The metrics of the run's task and its loss on held-out rows, each under its name in metrics.jsonl.

    Sums are exact (`math.fsum`), so that they do not depend on which rank had which row.
    Raises ValueError when nothing can be measured.
    """
    if config.task.name == "sft":
        count = sum(tokens for _, tokens in outputs.losses)
        loss = math.fsum(value for value, _ in outputs.losses) / count
        return {"eval/loss": loss, "eval/perplexity": math.exp(loss) if loss < 700 else math.inf}
    value = held_out_loss(outputs.records, config)
    found = {} if value is None else {"eval/loss": value}
    if config.task.name == "classify":
        return {"eval/accuracy": accuracy(outputs.records), **found}
    return {**summarise(fused(outputs.records, config).records), **found}


def held_out_loss(records: Records, config: RunConfig) -> float | None:
    """The loss that the run trains on, of rows that it does not: its sum over its units, divided by their count.

    A loss that learns from a teacher is of those rows that have the teacher's scores: None without any.
    """
    loss, sums, documents = loss_of(config), [], 0
    for row in records.values():
        if "scores" in loss.targets and any(map(math.isnan, row.taught)):
            continue
        fields = {"labels": torch.tensor(row.labels), "scores": torch.tensor(row.taught)}
        fields["group"] = torch.zeros(len(row.labels), dtype=torch.int64)
        targets = (fields[name] for name in loss.targets)
        sums.append(float(loss.function(torch.tensor(row.scores), *targets, config.loss)))
        documents += len(row.labels)
    return math.fsum(sums) / loss.count(documents, len(sums)) if sums else None


def accuracy(records: Records) -> float:
    """Share of the rows whose class has the largest logit; a tie counts for its share."""
    right = []
    for row in records.values():
        for logits, label in zip(row.scores, row.labels, strict=True):
            largest = [number for number, logit in enumerate(logits) if logit == max(logits)]
            right.append((label in largest) / len(largest) if largest else 0.0)
    return math.fsum(right) / len(right)


def summarise(records: Records) -> dict[str, float]:
    """Mean of each ranking metric over the groups; groups without a positive document have none and are left out.

    Raises ValueError when no group is left.
    """
    ranked = [(scores, labels) for scores, labels, *_ in records.values() if any(label > 0 for label in labels)]
    if not ranked:
        raise ValueError("no group with a positive document to evaluate")
    return {name: math.fsum(metric(*scored) for scored in ranked) / len(ranked) for name, metric in METRICS.items()}


def warnings(records: Records) -> list[str]:
    """What is suspicious about these scores of documents: not finite, or equal for all documents of a group."""
    found = []
    broken = [index for index, (scores, *_) in records.items() if not all(map(math.isfinite, scores))]
    if broken:
        found.append(
            f"{len(broken)} of {len(records)} groups have a score that is not finite (first: group {broken[0]})"
        )
    flat = [index for index, (scores, *_) in records.items() if len(scores) > 1 and len(set(scores)) == 1]
    if flat and len(flat) * 2 >= len(records):
        found.append(
            f"all documents of a group score alike in {len(flat)} of {len(records)} groups: "
            "the model does not tell documents apart"
        )
    return found
