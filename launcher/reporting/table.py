"""A table of a page: text cells, which the template escapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under a head; without rows, `why` says why."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    about: str = ""
    why: str = ""
    right: Sequence[int] = ()  # columns of numbers
    best: Sequence[tuple[int, int]] = ()  # (row, column) of cells to mark
