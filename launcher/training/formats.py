"""Rows of a data file as reranker groups: the native form and ms-swift's reranker rows. No torch.

native   {"id"?, "instruction"?, "query": C, "positives": [C, ...], "negatives": [C, ...]}
         {"instruction"?, "query": C, "documents": [C, ...], "labels": [1, 0, ...]}   (Qwen's script, with labels)
         C is a text, or {"text": text or list, "image"|"images": path or list, "min_pixels"?, "max_pixels"?};
         images come first, then texts; empty content reads NULL as in Qwen's published code.
swift    {"messages": [...], "positive_messages": [[...], ...], "negative_messages": [[...], ...], "images",
         "positive_images", "negative_images"}; `<image>` tags mark where images go, a system message is the
         instruction.

Other keys of a row are ignored, unless they name media or scores that training would then silently miss.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.spec import DatasetConfig, RunConfig
from launcher.training.jsonl import BadRow, RowError, describe, read_lines

__all__ = ["BadRow", "Content", "Group", "Image", "read_groups", "read_split"]


@dataclass(frozen=True, slots=True)
class Image:
    """A picture by path, or its encoded bytes; the pixel limits are this picture's own, else the model's."""

    path: str | None
    data: bytes | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __str__(self) -> str:
        return self.path if self.path is not None else "embedded image"


Content = tuple[str | Image, ...]  # in reading order


@dataclass(frozen=True, slots=True)
class Group:
    """A query with its documents; labels are 1.0 or 0.0, positives first."""

    id: str
    where: str  # file:line
    instruction: str | None
    query: Content
    documents: tuple[Content, ...]
    labels: tuple[float, ...]
    repeats: int = 0  # documents of the row that were dropped as exact repeats


@dataclass(frozen=True, slots=True)
class Parts:
    """What a row says, before the checks that all formats share."""

    instruction: str | None
    query: Content
    positives: list[Content]
    negatives: list[Content]


def read_split(config: RunConfig, split: str) -> tuple[list[Group], list[BadRow]]:
    """The rows of "train" or "eval" as this run needs them; two empty lists for an eval split that isn't given.

    A list of positives alone teaches a listwise loss nothing and makes every ranking perfect, so there, and
    for evaluation, rows need negatives.
    """
    if split == "eval" and config.dataset.format != "digits" and config.dataset.eval is None:
        return [], []
    need_negatives = split == "eval" or config.loss.name == "listwise"
    return read_groups(config.dataset, split, seed=config.train.seed, need_negatives=need_negatives)


def read_groups(
    dataset: DatasetConfig, split: str, *, seed: int, need_negatives: bool = False
) -> tuple[list[Group], list[BadRow]]:
    """All groups of a split and the rows that can't be used; image files are looked up, not opened.

    The training split only: `dataset.max_rows` keeps that many rows, good or bad, from its start;
    `dataset.shuffle_labels` (a control: nothing can be learned) permutes the labels within each group.
    """
    max_rows = dataset.max_rows if split == "train" else None
    bad: list[BadRow] = []
    if dataset.format == "digits":
        from launcher.training.digits import read_digits

        groups = read_digits(split, seed=seed, max_rows=max_rows)
    else:
        groups, bad = _read_file(_data_file(dataset, split), dataset.format, max_rows, need_negatives)
    if dataset.shuffle_labels and split == "train":
        groups = [_shuffled(group, f"{seed}:{row}") for row, group in enumerate(groups)]
    return groups, bad


def _read_file(
    path: Path, format_name: str, max_rows: int | None, need_negatives: bool
) -> tuple[list[Group], list[BadRow]]:
    # imported here: the parsers build on this module's types
    from launcher.training.native import native_parts
    from launcher.training.swift import swift_parts

    parsers = {"native": native_parts, "swift": swift_parts}
    groups: list[Group] = []
    bad: list[BadRow] = []
    for number, row in read_lines(path):
        if max_rows is not None and len(groups) + len(bad) >= max_rows:
            break
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        where, row_id = f"{path}:{number}", _row_id(row, number)
        try:
            name = format_name if format_name != "auto" else _detect(row)
            groups.append(_group(row_id, where, parsers[name](row, path.parent), need_negatives))
        except RowError as error:
            bad.append(BadRow(where, row_id, str(error)))
    return groups, bad


def _data_file(dataset: DatasetConfig, split: str) -> Path:
    value = dataset.train if split == "train" else dataset.eval
    key = f"dataset.{split}"
    if not value:
        raise ConfigError(Problem(f"{key} is not given: a file of JSON lines", tries=(f"{key}=FILE.jsonl",)))
    path = Path(value)
    if not path.is_file():
        what = "is a folder, not a file of JSON lines" if path.is_dir() else "does not exist"
        raise ConfigError(Problem(f"{key}={value} {what}", tries=(f"{key}=FILE.jsonl",)))
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(Problem(f"{key}={value} can't be read: {error.strerror}", tries=("chmod +r",))) from None
    return path


def _row_id(row: dict[str, Any], number: int) -> str:
    """The row's id as text (an integer keeps all its digits), else its line number."""
    value = row.get("id")
    return str(number) if value is None or value == "" else str(value)


def _detect(row: dict[str, Any]) -> str:
    if "messages" in row or "positive_messages" in row:
        return "swift"
    if "query" in row and row.keys() & {"positives", "positive", "negatives", "negative", "documents"}:
        return "native"
    keys = ", ".join(sorted(row)) or "none"
    raise RowError(
        f'unknown format: its keys are {keys}; a row looks like {{"query": "...", "positives": ["..."], '
        '"negatives": ["..."]} or has "messages", "positive_messages", "negative_messages"'
    )


def _group(row_id: str, where: str, parts: Parts, need_negatives: bool) -> Group:
    if not parts.positives:
        raise RowError("no positives")
    if need_negatives and not parts.negatives:
        raise RowError("no negatives")
    positives, negatives = list(dict.fromkeys(parts.positives)), list(dict.fromkeys(parts.negatives))
    both = set(positives) & set(negatives)
    if both:
        shown = describe(" ".join(str(part) for part in next(doc for doc in positives if doc in both)))
        raise RowError(f"document both positive and negative: {shown}")
    documents = (*positives, *negatives)
    return Group(
        id=row_id,
        where=where,
        instruction=parts.instruction,
        query=parts.query,
        documents=documents,
        labels=(1.0,) * len(positives) + (0.0,) * len(negatives),
        repeats=len(parts.positives) + len(parts.negatives) - len(documents),
    )


def _shuffled(group: Group, key: str) -> Group:
    """The same documents with their labels dealt anew, a pure function of `key`; positives first again."""
    order = list(range(len(group.documents)))
    random.Random(key).shuffle(order)
    return replace(group, documents=tuple(group.documents[i] for i in order))
