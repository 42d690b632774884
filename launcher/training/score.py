"""Scores of a file's rows with a trained reranker: one JSON line a row, in the file's order.

A row or document that can't be read has no score and says why: it is never scored as if it were empty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.golden import sigmoid
from launcher.plain import from_data
from launcher.rundir import RunDir, read_json
from launcher.spec import RunConfig, RunPlan
from launcher.training import finished
from launcher.training.check import count
from launcher.training.evaluate import score_rows
from launcher.training.finished import Finished
from launcher.training.formats import Raw, limited, parse, raw_rows
from launcher.training.jsonl import BadRow, RowError, parse_line
from launcher.training.parts import Parts, Talk
from launcher.training.progress import progress
from launcher.training.rows import Group
from launcher.training.segments import Fusion, fuse

CHUNK = 32  # rows between two words on the progress
SHOWN = 20  # bad rows named when no row is good


def main(plan: RunPlan, weights: Path, file: str, out: Path) -> int:
    """Score `file` into `out`, which appears whole; 0, also with bad rows. Raises ConfigError when none is good."""
    rows = list(rows_to_score(plan.config, file))
    if not any(isinstance(row, Group) for row in rows):
        reasons = [f"{row.where}  {row.reason}" for row in rows[:SHOWN] if isinstance(row, BadRow)]
        raise ConfigError(Problem("\n".join([f"{file} has no row to score", *reasons])), title="with the data")
    model = finished.load(plan, weights)
    aside = out.with_name(f".{out.name}.tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    bad = documents = 0
    begun = time.monotonic()
    try:
        with open(aside, "w", encoding="utf-8") as target, progress("rows scored") as say:
            for first in range(0, len(rows), CHUNK):
                for line in score_chunk(model, rows[first : first + CHUNK]):
                    bad += "error" in line
                    documents += len(line["scores"])
                    target.write(json.dumps(line, ensure_ascii=False) + "\n")
                say(min(first + CHUNK, len(rows)), len(rows))
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)
    marked = f", {bad:,} with an error" if bad else ""
    scored = f"{count(len(rows), 'row')}{marked}, {count(documents, 'document')}"
    print(f"{scored} in {time.monotonic() - begun:.0f} s: {out}")
    return 0


def rows_to_score(config: RunConfig, file: str) -> Iterator[Group | BadRow]:
    """Every row of a file in its order, as `dataset.format` reads it; a row's documents in the row's own order.

    Rows need no labels: a query with its "documents" will do.
    """
    form = "auto" if config.dataset.format == "digits" else config.dataset.format  # digits are drawn, not read
    data = replace(config.dataset, train=file, format=form, weights=None, max_rows=None, eval_fraction=0.0)
    config = replace(config, dataset=data)
    for raw in raw_rows(config, "train"):
        found = parse(config, "train", _labelled(config, raw), make=_group)
        yield from [found] if isinstance(found, BadRow) else (row for row in found if isinstance(row, Group))


def _labelled(config: RunConfig, raw: Raw) -> Raw:
    """The row with a label for each of its documents, which formats ask for and scoring has no use for."""
    if isinstance(raw.data, BadRow):
        return raw
    try:
        row = parse_line(raw.data) if isinstance(raw.data, bytes) else raw.data
    except RowError:
        return raw  # `parse` says why
    documents = row.get(config.dataset.columns.get("documents", "documents"))
    if not isinstance(documents, list) or {"positive", "labels", "scores"} & row.keys():
        return raw
    return replace(raw, data={**row, "labels": [0] * len(documents)})


def _group(config: RunConfig, split: str, found: Parts | Talk, row_id: str, raw: Raw) -> Group:
    """All documents as they stand, repeats too."""
    if isinstance(found, Talk):
        raise RowError("a chat: scores are for a query with documents")
    if not found.documents:
        raise RowError("no documents")
    limits = (config.dataset.min_pixels, config.dataset.max_pixels)
    return Group(
        id=row_id,
        where=raw.where,
        instruction=found.instruction,
        query=limited(found.query, *limits),
        documents=tuple(limited(document.content, *limits) for document in found.documents),
        labels=tuple(document.label for document in found.documents),
    )


def score_chunk(model: Finished, rows: Sequence[Group | BadRow]) -> list[dict[str, Any]]:
    """One JSON-ready line a row."""
    groups = [row for row in rows if isinstance(row, Group)]
    logits = iter(_logits(model, groups))
    lines = []
    for row in rows:
        line: dict[str, Any] = {"id": row.id, "where": row.where, "scores": [], "logits": []}
        if isinstance(row, BadRow):
            line["error"] = row.reason
        else:
            found = next(logits)
            line["logits"] = [value if isinstance(value, float) else None for value in found]
            line["scores"] = [sigmoid(value) if isinstance(value, float) else None for value in found]
            if any(row.labels):
                line["labels"] = list(row.labels)
            reasons = [f"document {i}: {why}" for i, why in enumerate(found) if isinstance(why, str)]
            if reasons:
                line["error"] = "; ".join(reasons)
        lines.append(line)
    return lines


def _logits(model: Finished, groups: Sequence[Group]) -> list[list[float | str]]:
    """z_yes - z_no of each document of each group, or why it has none."""
    found = _forward(model, groups)
    out: list[list[float | str]] = []
    for index, group in enumerate(groups):
        scores: list[float | str] = []
        for d in range(len(group.documents)):
            value = found.get((index, d))
            scores.append(_alone(model, group, d) if value is None else value)
        out.append(scores)
    return out


def _alone(model: Finished, group: Group, d: int) -> float | str:
    """A document that went missing with others of its row: by itself, or the reason it can't be scored."""
    model.said.clear()
    single = replace(group, documents=(group.documents[d],), labels=(0.0,), scores=None)
    value = _forward(model, [single]).get((0, 0))
    if value is not None:
        return value
    return model.said[-1].removeprefix("left out: ") if model.said else "it could not be read"


def _forward(model: Finished, groups: Sequence[Group]) -> dict[tuple[int, int], float]:
    """(group, document) -> score of all that could be read."""
    # A label travels with its document, and with each segment of it: here it is the document's number. From 1, since
    # 0 means "not relevant".
    numbered = [replace(g, labels=tuple(map(float, range(1, len(g.documents) + 1))), scores=None) for g in groups]
    outputs = score_rows(model.scorer, model.maker, numbered, model.rank)
    parts: dict[tuple[int, int], list[float]] = {}
    for row, scored in outputs.records.items() if outputs else ():
        for score, label in zip(scored.scores, scored.labels, strict=True):
            parts.setdefault((row, int(label) - 1), []).append(score)
    video, fitted = model.plan.config.dataset.video, _fitted(model.plan)
    return {key: fuse(scores, video, fitted) for key, scores in parts.items()}


def _fitted(plan: RunPlan) -> Fusion | None:
    """The model that an evaluation of the run fitted to its segments' scores, where dataset.video.fuse asks for it."""
    file = RunDir(Path(plan.run_dir)).fusion
    if plan.config.dataset.video.fuse != "logistic":
        return None
    if not file.is_file():
        text = f"dataset.video.fuse=logistic takes {file}, which an evaluation of long enough videos writes"
        raise ConfigError(Problem(text, tries=("dataset.video.fuse=max",)))
    return from_data(Fusion, read_json(file))
