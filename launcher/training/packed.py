"""Rows as compact JSON bytes and back, their embedded pictures kept apart; what they are made of. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from launcher.training.rows import Chat, Content, Group, Image, Row, Turn, Video

Keep = Callable[[bytes], tuple[int, int]]  # encoded picture -> its first byte and length in the blob


def pack(row: Row, keep: Keep) -> bytes:
    """A row as JSON; pictures that it holds as bytes go to `keep`."""
    data = _given(row)
    if isinstance(row, Group):
        data["query"] = _content(row.query, keep)
        data["documents"] = [_content(document, keep) for document in row.documents]
    else:
        data["turns"] = [[turn.role, _content(turn.content, keep), turn.train] for turn in row.turns]
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def unpack(packed: bytes, blob: str) -> Row:
    """The row that `pack` wrote; pictures that were embedded are spans of the file `blob`."""
    data = json.loads(packed)
    if "turns" in data:
        turns = (Turn(role=role, content=_uncontent(part, blob), train=train) for role, part, train in data["turns"])
        return Chat(**{**data, "turns": tuple(turns)})
    data["query"] = _uncontent(data["query"], blob)
    data["documents"] = tuple(_uncontent(document, blob) for document in data["documents"])
    return Group(**{"instruction": None, **data, **{n: tuple(data[n]) for n in ("labels", "scores") if n in data}})


def contents(row: Row) -> Iterator[Content]:
    """All contents of a row: a query and its documents, or the messages of a chat."""
    if isinstance(row, Group):
        yield row.query
        yield from row.documents
    else:
        yield from (turn.content for turn in row.turns)


def media_of(row: Row) -> Iterator[Image | Video]:
    """Every picture and film of a row, repeats included."""
    return (part for content in contents(row) for part in content if not isinstance(part, str))


def modality(content: Content) -> str:
    """text, image or video; mixed for more than one of them."""
    kinds = {"text" if isinstance(part, str) else type(part).__name__.lower() for part in content}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "text"


def _given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass value that are not their defaults."""
    found = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    return {name: item for name, (item, default) in found.items() if item != default and item is not None}


def _content(content: Content, keep: Keep) -> list[Any]:
    return [part if isinstance(part, str) else _medium(part, keep) for part in content]


def _medium(part: Image | Video, keep: Keep) -> list[Any]:
    if isinstance(part, Image) and part.data is not None:
        return ["blob", _given(replace(part, data=None, span=keep(part.data)))]
    return [type(part).__name__, _given(part)]


def _uncontent(content: list[Any], blob: str) -> Content:
    return tuple(part if isinstance(part, str) else _unmedium(part[0], part[1], blob) for part in content)


def _unmedium(kind: str, given: dict[str, Any], blob: str) -> Image | Video:
    data = {"path": blob if kind == "blob" else None, **given}
    data |= {name: tuple(data[name]) for name in ("span", "frames") if name in data}
    return Video(**data) if kind == "Video" else Image(**data)
