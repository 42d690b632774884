"""Strict JSON lines: every line is a dictionary, or a BadRow that says where and why it isn't."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be used; `reason` is a kind, or `kind: details`."""

    where: str  # file:line
    id: str
    reason: str

    @property
    def kind(self) -> str:
        """The reason without its details, for counting."""
        return self.reason.partition(":")[0]


class RowError(ValueError):
    """Why one row can't be used; readers turn it into a BadRow."""


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield (line number from 1, row or BadRow); blank lines are skipped.

    A file that isn't lines of UTF-8 at all (UTF-16, one JSON array) yields a single BadRow and ends.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            problem = _wrong_file(line) if number == 1 else None
            if problem:
                yield number, BadRow(f"{path}:{number}", str(number), problem)
                return
            if not line.strip():
                continue
            try:
                yield number, parse_line(line)
            except RowError as error:
                yield number, BadRow(f"{path}:{number}", str(number), str(error))


def parse_line(line: bytes) -> dict[str, Any]:
    """One JSON object, without anything JSON readers disagree about; raises RowError with the reason."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise RowError(f"not UTF-8: byte 0x{byte:02x} at position {error.start + 1}") from None
    try:
        row = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RowError:
        raise
    except json.JSONDecodeError as error:
        hint = "; JSON has no comments" if text.lstrip().startswith(("//", "#")) else ""
        raise RowError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{hint}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets nested too deep
        raise RowError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"not an object: the line holds {describe(row)}")
    if "\\u" in text and _has_lone_surrogate(row):
        raise RowError("half a surrogate pair: some \\uD800..\\uDFFF escape stands alone")
    return row


def describe(value: Any) -> str:
    """A JSON value for a message: its kind, and the value itself when that is short."""
    if value is None:
        return "null"
    kinds = {bool: "the truth value", int: "the number", float: "the number", str: "the text", list: "a list"}
    kind = kinds.get(type(value), "an object")
    shown = json.dumps(value, ensure_ascii=False)
    return f"{kind} {shown}" if len(shown) <= 60 else kind


def _wrong_file(first_line: bytes) -> str | None:
    if first_line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in first_line:
        return "UTF-16: the file looks like UTF-16; save it as UTF-8"
    if first_line.lstrip().startswith(b"["):
        return "JSON array: the file must hold one JSON object a line (jq -c '.[]' FILE writes that)"
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RowError(f'duplicate key: "{twice}"')
    return row


def _no_constant(name: str) -> None:
    raise RowError(f"not a number: {name}")


def _has_lone_surrogate(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
