"""Lines of text for people: aligned tables, wrapped sentences, sizes; at most WIDTH columns where words allow it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from launcher.planning.gpus import GIB
from launcher.prepared import columns

WIDTH = 110
LEAST_TEXT = 40  # columns that sentences beside a table get at least, however wide its other cells are


def table(rows: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> list[str]:
    """Columns two spaces apart, those of `right` aligned at their end."""
    return [f"  {line}".rstrip() for line in columns(rows, right)]


def table_with_text(rows: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> list[str]:
    """A table whose last column holds sentences, which go on below themselves."""
    heads = columns([(*row[:-1], "|") for row in rows], right)
    indent = 2 + max(len(head) for head in heads) - 1
    width = max(WIDTH, indent + LEAST_TEXT)
    lines = []
    for row, head in zip(rows, heads, strict=True):
        first = f"  {head[:-1]}"
        lines += wrap(row[-1], " " * indent, first=first, width=width) if row[-1] else [first.rstrip()]
    return lines


def wrap(text: str, indent: str, *, first: str = "", width: int = WIDTH) -> list[str]:
    """Lines of a sentence, the later ones indented; a word longer than a line stays whole."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def beside(shown: str, text: str, indent: str) -> list[str]:
    """What must stand as it is, and a sentence about it: on the same line when it fits, else below."""
    if len(shown) + 2 + len(text) <= WIDTH:
        return [f"{shown}  {text}"]
    return [shown, *wrap(text, indent, first=indent)]


def item(text: str) -> list[str]:
    """An entry of a list of sentences."""
    return wrap(f"  - {text}", "    ")


def count(number: int, unit: str, plural: str | None = None) -> str:
    """A number with its noun."""
    return f"{number:,} {unit if number == 1 else plural or unit + 's'}"


def gib(size: float) -> str:
    """GiB without the unit, small ones with three places."""
    return f"{size / GIB:.3f}" if size < GIB / 100 else f"{size / GIB:.2f}"


def digits(value: float) -> str:
    """Three digits, or the whole number of a large one.

    Example:
        >>> digits(0.01234), digits(4.1), digits(12.34), digits(1234.5)
        ('0.0123', '4.10', '12.3', '1,234')
    """
    places = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.3g}" if 0 < value < 0.9995 else f"{value:,.{places}f}"


def seconds(value: float) -> str:
    """A short time in three digits, no finer than a hundredth of a millisecond.

    Example:
        >>> seconds(0.00005), seconds(0.0123), seconds(0.9), seconds(3.4), seconds(123.4)
        ('0.05 ms', '12.3 ms', '900 ms', '3.40 s', '123 s')
    """
    if value < 0.9995e-3:
        return f"{1000 * value:.2f} ms"
    return f"{digits(1000 * value)} ms" if value < 0.9995 else f"{digits(value)} s"
