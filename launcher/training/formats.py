"""Rows of data files, folders and hub data sets as reranker groups or chats. No torch.

`raw_rows` reads, `parse` makes one row of a file into rows of ours (a pure function, for a pool of processes), and
`assemble` does what needs all of them. `dataset.format` names one of FORMATS, or a function of the user's:

    def function(row: dict) -> dict | None

It is given a row as it stands in the file and returns one in any form that is read here (told by its keys), or
None to leave the row out. With "auto" every row is told by its keys: see launcher.training.detect.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.datafiles import is_divided
from launcher.spec import RunConfig
from launcher.training.functions import load_function
from launcher.training.jsonl import BadRow, RowError, describe, parse_line
from launcher.training.parts import Parts, Talk
from launcher.training.rows import Chat, Content, Group, Image, Row

__all__ = ["BadRow", "Raw", "assemble", "parse", "raw_rows", "read_split"]

NEED_NEGATIVES = ("listwise", "pairwise")  # losses that a list of positives alone teaches nothing


@dataclass(frozen=True, slots=True)
class Raw:
    """One row as it stands in a file: a line of JSON, a dictionary, or what is wrong with it."""

    source: int  # which entry of dataset.train (or eval)
    where: str  # file:line, or file:row
    folder: str  # what image paths are relative to
    data: bytes | dict[str, Any] | BadRow


def read_split(config: RunConfig, split: str) -> tuple[list[Row], list[BadRow]]:
    """The rows of "train" or "eval" as this run needs them; two empty lists for an eval split that isn't given."""
    if config.dataset.format == "digits":
        from launcher.training.digits import read_digits

        limit = config.dataset.max_rows if split == "train" else None
        digits = read_digits(split, seed=config.train.seed, max_rows=limit)
        return assemble(config, split, digits)
    rows: list[Row] = []
    bad: list[BadRow] = []
    for raw in raw_rows(config, split):
        found = parse(config, split, raw)
        if isinstance(found, BadRow):
            bad.append(found)
        else:
            rows += found
    kept, more = assemble(config, split, rows)
    return kept, bad + more


def raw_rows(config: RunConfig, split: str) -> Iterator[Raw]:
    """Every row of a split as it stands in its files, in their order; nothing for an eval split that isn't given.

    Of training rows `dataset.max_rows` keeps that many, good or bad, from the start. With `dataset.eval_fraction`
    both splits are made of the same rows: `assemble` divides them. Raises ConfigError for what is no data set.
    """
    from launcher.training.sources import read_sources

    limit = config.dataset.max_rows if split == "train" or is_divided(config.dataset) else None
    for number, raw in enumerate(read_sources(config.dataset, split)):
        if limit is not None and number >= limit:
            return
        yield raw


Make = Callable[[RunConfig, str, Parts | Talk, str, Raw], Row]


def parse(config: RunConfig, split: str, raw: Raw, make: Make | None = None) -> list[Row] | BadRow:
    """One raw row as rows of ours (a user's function may leave it out: none), or why it can't be used.

    `make` turns what the row says into a row for another use than training, and raises RowError.
    """
    number = raw.where.rpartition(":")[2]
    row_id = number
    if isinstance(raw.data, BadRow):
        return raw.data
    try:
        row = parse_line(raw.data) if isinstance(raw.data, bytes) else raw.data
        # Null is how columns say that a row hasn't them.
        given, row = row.keys(), {key: value for key, value in row.items() if value is not None}
        row_id = _row_id(row, number)
        own = ":" in config.dataset.format
        if own:
            made_of_it = _called(config.dataset.format, row)
            if made_of_it is None:
                return []
            given, row, row_id = made_of_it.keys(), made_of_it, _row_id(made_of_it, row_id)
        row = _renamed(row, config.dataset.columns, given)
        name = None if own or config.dataset.format == "auto" else config.dataset.format
        found = _parsed(config, name, row, Path(raw.folder))
        made = (make or _made)(config, split, found, row_id, raw)
    except RowError as error:
        return BadRow(raw.where, row_id, str(error))
    return [made]


def assemble(config: RunConfig, split: str, rows: Iterable[Row]) -> tuple[list[Row], list[BadRow]]:
    """What needs all rows: documents of a query that has a row for each are joined, and the held-out part is divided.

    `dataset.shuffle_labels` (a control: nothing can be learned) permutes the labels within each training group.
    """
    data = config.dataset
    kept, bad = _joined(rows, on_bad=data.on_bad)
    if is_divided(data):
        kept = [row for row in kept if (_draw(row) < data.eval_fraction) == (split == "eval")]
    bad += [BadRow(row.where, row.id, why) for row in kept if (why := _lack(config, split, row))]
    unusable = {row.where for row in bad}
    kept = [row for row in kept if row.where not in unusable] if bad else kept
    if data.shuffle_labels and split == "train":
        kept = [_shuffled(row, f"{config.train.seed}:{at}") for at, row in enumerate(kept)]
    return kept, bad


def _row_id(row: dict[str, Any], number: str) -> str:
    """The row's id as text (an integer keeps all its digits), else its line number."""
    value = row.get("id")
    return number if value is None or value == "" else str(value)


def _called(name: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """What the user's function that dataset.format names makes of a row."""
    function = load_function(name, "dataset.format")
    try:
        made = function(row)
    except Exception as error:  # the user's code, on the user's row
        raise RowError(f"{name} raised {type(error).__name__}: {error}") from error
    if made is not None and not isinstance(made, dict):
        raise RowError(f"wrong type: {name} must return a dictionary or None, not {describe(made)}")
    return made


def _renamed(row: dict[str, Any], columns: dict[str, str], given: Collection[str]) -> dict[str, Any]:
    """The row under our names; a column may serve only one of them. `given` are also those of empty cells."""
    for ours, theirs in columns.items():
        if theirs not in given and ours not in given:
            raise RowError(f"no column {theirs} for dataset.columns.{ours}; its keys are {', '.join(sorted(row))}")
    taken = {theirs: ours for ours, theirs in columns.items() if theirs in row}
    return {key: value for key, value in row.items() if key not in taken} | {taken[t]: row[t] for t in taken}


def _parsed(config: RunConfig, name: str | None, row: dict[str, Any], folder: Path) -> Parts | Talk:
    from launcher.training.detect import detect, parser_of

    return parser_of(name or detect(row, config.task.name))(row, folder)


def _made(config: RunConfig, split: str, found: Parts | Talk, row_id: str, raw: Raw) -> Row:
    task, data = config.task.name, config.dataset
    limits = (data.min_pixels, data.max_pixels)
    if isinstance(found, Talk):
        if task == "rerank":
            raise RowError("a chat: task=rerank needs a query and documents; task=sft trains on chats")
        if task == "classify" and found.label is None:
            raise RowError('no label: task=classify needs a "label" in each row')
        if task == "sft" and not any(turn.train for turn in found.turns):
            raise RowError("no answer: the chat has no turn of the assistant to learn")
        turns = tuple(replace(turn, content=limited(turn.content, *limits)) for turn in found.turns)
        return Chat(id=row_id, where=raw.where, turns=turns, label=found.label, source=raw.source)
    if task == "classify":
        raise RowError("a query with documents: task=classify needs a text and its label; task=rerank trains on these")
    found = replace(
        found,
        query=limited(found.query, *limits),
        documents=tuple(replace(doc, content=limited(doc.content, *limits)) for doc in found.documents),
    )
    group = _group(row_id, raw.where, found, on_bad=data.on_bad, source=raw.source)
    if not group.judged and (why := _lack(config, split, group)):
        raise RowError(why)
    return group


def limited(content: Content, low: int | None, high: int | None) -> Content:
    """With the data set's pixel limits on images that have none of their own."""
    if low is None and high is None:
        return content
    return tuple(
        replace(part, min_pixels=part.min_pixels or low, max_pixels=part.max_pixels or high)
        if isinstance(part, Image)
        else part
        for part in content
    )


def _group(row_id: str, where: str, parts: Parts, *, on_bad: str, source: int) -> Group:
    """Positives first; exact repeats are dropped, and with on_bad=skip also what stands on both sides."""
    distinct = list({(doc.content, doc.label > 0): doc for doc in reversed(parts.documents)}.values())[::-1]
    sides = {side: {doc.content for doc in distinct if (doc.label > 0) == side} for side in (True, False)}
    both = sides[True] & sides[False]
    kept = [doc for doc in distinct if doc.content not in both]
    if both and (on_bad == "error" or not any(doc.label > 0 for doc in kept)):
        shown = describe(" ".join(str(part) for part in next(doc.content for doc in distinct if doc.content in both)))
        raise RowError(f"document both positive and negative: {shown}")
    kept.sort(key=lambda doc: doc.label <= 0)
    scores = tuple(doc.score for doc in kept if doc.score is not None)
    if scores and len(scores) < len(kept):
        raise RowError(f"scores do not match: {len(scores)} scores for {len(kept)} documents")
    return Group(
        id=row_id,
        where=where,
        instruction=parts.instruction,
        query=parts.query,
        documents=tuple(doc.content for doc in kept),
        labels=tuple(doc.label for doc in kept),
        scores=scores or None,
        repeats=len(parts.documents) - len(distinct),
        contradictory=len(distinct) - len(kept),
        source=source,
        judged=parts.judged,
    )


def _lack(config: RunConfig, split: str, row: Row) -> str | None:
    """Why a group teaches or measures nothing here.

    A list of positives alone makes every ranking perfect and gives some losses nothing to compare; random
    negatives may still be drawn for it. One judged document is enough for a loss on documents.
    """
    if not isinstance(row, Group) or config.task.name == "sft":
        return None
    data, positive = config.dataset, any(label > 0 for label in row.labels)
    compared = split == "eval" or config.loss.name in NEED_NEGATIVES
    if not positive and (compared or not row.judged):
        return "no positives"
    if compared and not data.random_negatives and all(label > 0 for label in row.labels):
        return "no negatives"
    if config.loss.name == "distill" and row.scores is None and (split == "train" or config.metric == "loss"):
        return "no scores: loss=distill learns a teacher's, one a document"
    return None


def _joined(rows: Iterable[Row], *, on_bad: str) -> tuple[list[Row], list[BadRow]]:
    """Groups of one judged document each become one group a query, where its first stood."""
    kept: list[Row] = []
    bad: list[BadRow] = []
    places: dict[Any, int] = {}
    more: dict[int, list[Group]] = {}
    for row in rows:
        if isinstance(row, Group) and row.judged:
            key = (row.source, row.instruction, row.query)
            if key in places:
                more.setdefault(places[key], []).append(row)
                continue
            places[key] = len(kept)
        kept.append(row)
    for at, others in more.items():
        first = kept[at]
        assert isinstance(first, Group)
        kept[at] = merged = _merged([first, *others])
        if merged.contradictory and (on_bad == "error" or not merged.documents):
            bad.append(_judged_twice([first, *others]))
    unusable = {row.where for row in bad}
    return [row for row in kept if row.where not in unusable] if bad else kept, bad


def _merged(groups: list[Group]) -> Group:
    """A document judged twice keeps its first label; one judged both relevant and not is dropped."""
    first = groups[0]
    found: dict[Content, tuple[float, float | None]] = {}
    sides: dict[Content, set[bool]] = {}
    for group in groups:
        for at, document in enumerate(group.documents):
            found.setdefault(document, (group.labels[at], group.scores[at] if group.scores else None))
            sides.setdefault(document, set()).add(group.labels[at] > 0)
    whole = {document: judged for document, judged in found.items() if len(sides[document]) == 1}
    both = sum(document not in whole for group in groups for document in group.documents)
    ordered = sorted(whole.items(), key=lambda item: item[1][0] <= 0)
    scores = tuple(score for _, (_, score) in ordered if score is not None)
    return replace(
        first,
        documents=tuple(document for document, _ in ordered),
        labels=tuple(label for _, (label, _) in ordered),
        scores=scores if len(scores) == len(ordered) else None,
        repeats=sum(group.repeats for group in groups) + len(groups) - len(ordered) - both,
        contradictory=both,
    )


def _judged_twice(groups: list[Group]) -> BadRow:
    """The bad row of groups whose documents contradict one another: the first of them, and the row that does."""
    before: dict[Content, float] = {}
    for group in groups:
        for document, label in zip(group.documents, group.labels, strict=True):
            if (before.setdefault(document, label) > 0) != (label > 0):
                shown = describe(" ".join(map(str, document)))
                reason = f"document both positive and negative: {shown}, by {group.where} too"
                return BadRow(groups[0].where, groups[0].id, reason)
    raise AssertionError("no contradiction")


def _draw(row: Row) -> float:
    """A number from 0 to below 1 that only the query decides (of a chat: its first message from the user).

    Files count by their last name and size, so that it is the same wherever the data lie.
    """
    if isinstance(row, Group):
        content = row.query
    else:
        content = next((turn.content for turn in row.turns if turn.role == "user"), ())
    digest = hashlib.sha256()
    for part in content:
        if isinstance(part, str):
            digest.update(b"t" + part.encode())
        elif isinstance(part, Image) and part.data is not None:
            digest.update(b"d" + hashlib.sha256(part.data).digest())
        else:
            path = part.path if part.path is not None else getattr(part, "frames", ("",))[0]
            # Its size too: in many sets each folder has an `image.jpg`, and all rows would ask the same.
            digest.update(b"f" + Path(path).name.encode() + b"%d" % os.path.getsize(path))
    return int.from_bytes(digest.digest()[:7], "big") / 2**56


def _shuffled(row: Row, key: str) -> Row:
    """The same documents with their labels dealt anew, a pure function of `key`; positives first again."""
    if not isinstance(row, Group):
        return row
    order = list(range(len(row.documents)))
    random.Random(key).shuffle(order)
    return replace(row, documents=tuple(row.documents[i] for i in order))
