"""A table of a page: text cells, which the template escapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under a head; without rows, `why` says why, unless a plot of the same things does."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    about: str = ""
    why: str = ""
    right: Sequence[int] = ()  # columns of numbers
    best: Sequence[tuple[int, int]] = ()  # (row, column) of cells to mark
    cut: int = 10_000  # characters of a cell that are shown; the whole is in its title
    columns: int = 1  # in which the rows stand beside each other
    links: Mapping[int, str] = field(default_factory=dict)  # row -> where its first cell leads
    folded: bool = False  # opened by a click: a plot shows the same

    @property
    def blocks(self) -> list[Sequence[Sequence[str]]]:
        """The rows, cut into columns."""
        size = -(-len(self.rows) // self.columns)
        return [self.rows[start : start + size] for start in range(0, len(self.rows), size)]
