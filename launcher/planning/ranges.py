"""Compressed lists of host names, as Slurm and pdsh write them: gpu[01-03,07],login2."""

from __future__ import annotations

import re

MAX_HOSTS = 4096

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_list(text: str) -> list[str]:
    """Every name of a list whose names may hold ranges; ValueError says what is wrong.

    Example:
        >>> expand_list("gpu[01-03,07],login2")
        ['gpu01', 'gpu02', 'gpu03', 'gpu07', 'login2']
    """
    names: list[str] = []
    for piece in re.split(r",(?![^\[]*\])", text):
        names += expand_name(piece)
        _check_count(len(names), text)
    return names


def expand_name(name: str) -> list[str]:
    """node[1-2]n[08,9] -> node1n08 node1n9 node2n08 node2n9: the last range runs fastest; ValueError when wrong."""
    names = [""]
    rest = name
    while match := _RANGE.search(rest):
        items = _items(match.group(1))
        _check_count(len(names) * len(items), name)
        names = [before + rest[: match.start()] + item for before in names for item in items]
        rest = rest[match.end() :]
    return [before + rest for before in names]


def _items(inside: str) -> list[str]:
    items: list[str] = []
    for piece in inside.split(","):
        span = _SPAN.fullmatch(piece)
        if span is None:
            raise ValueError(f"[{inside}] is no range")
        first, last = span.group(1), span.group(2) or span.group(1)
        if int(last) < int(first):
            raise ValueError(f"range {piece} must rise")
        _check_count(int(last) - int(first) + 1, piece)
        items += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return items


def _check_count(count: int, text: str) -> None:
    if count > MAX_HOSTS:
        raise ValueError(f"{text} names more than {MAX_HOSTS} hosts")
