"""Strict JSON, and how a row that cannot be used is told: where it stands and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# What stands in the place of a data file after a download that went wrong, or before one is unpacked.
_OTHER_FILES = {
    b"\x1f\x8b": "compressed: the file is gzip; unpack it",
    b"(\xb5/\xfd": "compressed: the file is zstd; unpack it",
    b"pk\x03\x04": "compressed: the file is a zip archive; unpack it",
    b"version https://git-lfs": "not downloaded: the file is a pointer of Git LFS; git lfs pull fetches what it means",
    b"<!doctype html": "an HTML page: what was downloaded is not the data file",
    b"<html": "an HTML page: what was downloaded is not the data file",
}


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


def parse_line(line: bytes) -> dict[str, Any]:
    """One JSON object, without anything JSON readers disagree about; raises RowError with the reason."""
    row = load_json(line)
    if not isinstance(row, dict):
        raise RowError(f"not an object: the line holds {describe(row)}")
    return row


def load_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, no key twice, no NaN, no half characters; raises RowError with the reason."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise RowError(f"not UTF-8: byte 0x{byte:02x} at position {error.start + 1}") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RowError:
        raise
    except json.JSONDecodeError as error:
        hint = "; JSON has no comments" if text.lstrip().startswith(("//", "#")) else ""
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        raise RowError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{line}{hint}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets nested too deep
        raise RowError(f"not JSON: {error}") from None
    if "\\u" in text and _has_lone_surrogate(value):
        raise RowError("half a surrogate pair: some \\uD800..\\uDFFF escape stands alone")
    return value


def describe(value: Any) -> str:
    """A JSON value for a message: its kind, and the value itself when that is short."""
    if value is None:
        return "null"
    kinds = {bool: "the truth value", int: "the number", float: "the number", str: "the text", list: "a list"}
    kind = kinds.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return f"{kind} {shown}" if len(shown) <= 60 else kind


def wrong_file(first_line: bytes) -> str | None:
    """What is wrong with a whole file, seen from its first bytes."""
    if first_line.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16: the file looks like UTF-16; save it as UTF-8"
    for begin, what in _OTHER_FILES.items():
        if first_line[:40].lstrip().lower().startswith(begin):
            return what
    return "UTF-16: the file looks like UTF-16; save it as UTF-8" if b"\0" in first_line else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RowError(f'duplicate key: "{twice}"')
    return row


def _no_constant(name: str) -> None:
    raise RowError(f"not a number: {name}")


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
