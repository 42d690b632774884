"""What a row of any format says, before the checks that all formats share."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.training.rows import Content, Turn


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a query: `label` is 0 for a negative, above 0 for a positive; `score` is a teacher's."""

    content: Content
    label: float
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """A query with its documents in the row's order; `judged` marks one document of a query that has more rows."""

    instruction: str | None
    query: Content
    documents: tuple[Document, ...]
    judged: bool = False


@dataclass(frozen=True, slots=True)
class Talk:
    """A chat, or what a class is told of."""

    turns: tuple[Turn, ...]
    label: str | None = None
