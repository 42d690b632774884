"""A DeepSpeed JSON as DeepSpeed itself reads it (hjson: comments, missing and trailing commas), and where each key is.

hjson tells no positions, so a second, smaller reader finds the line of every key; the values are hjson's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.facts import TextFile

_BLANK = re.compile(r"(?:\s|,|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_TEXT = re.compile(r"'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
_BARE_KEY = re.compile(r"[^\s,:\[\]{}]+")
# A value without quotes is a word of JSON up to a comma, a bracket or a comment; anything else goes to the line's end.
_WORD = re.compile(r"(?:true|false|null|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?=\s*(?:$|[,\]}\n#]|//|/\*))")
_REST = re.compile(r"[^\n]*")
_DEEPEST = 20  # sections within sections: DeepSpeed's own go four deep
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_HINTS = ("{ ... }", "texts in quotes: one without them goes to the end of its line")


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """The object of a file, and the line of each key: `lines["zero_optimization.stage"]`."""

    path: str
    value: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """File and line of a key, or of the nearest section around it that the file has."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path}:{self.lines[key]}" if key else self.path


def read_hjson(file: TextFile) -> Read:
    """The object in `file`; what is no object, a key that stands twice and NaN are a ConfigError with the line."""
    import hjson

    text = file.text.removeprefix("\ufeff")
    if "\0" in text:
        raise ConfigError(Problem("holds NUL characters, as UTF-16 does", file.path, ("save the file as UTF-8",)))
    if _BLANK.match(text).end() == len(text):  # type: ignore[union-attr]
        raise ConfigError(Problem("there is nothing in the file", file.path, ('{"zero_optimization": {"stage": 2}}',)))
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        twice.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(items)

    try:
        value = hjson.loads(text, object_pairs_hook=pairs)
    except hjson.HjsonDecodeError as error:
        if "eof" in error.msg:
            why, line = "the file ends inside an object, a list or a text", text.rstrip().count("\n") + 1
        else:
            why, line = error.msg, error.lineno
        raise ConfigError(Problem(f"not JSON: {why}", f"{file.path}:{line}", _HINTS)) from None
    except (OverflowError, RecursionError, ValueError):
        text = "a number in it is too large, or it is nested too deep"
        raise ConfigError(Problem(text, file.path, ("a configuration that DeepSpeed reads",))) from None
    if not isinstance(value, dict):
        raise ConfigError(Problem("a DeepSpeed configuration is one JSON object", file.path, ("{ ... }",)))
    found = list(_keys(text))
    if twice:
        name = twice[0]
        line = _second_line(found, name)
        raise ConfigError(Problem(f"key {name} stands twice", f"{file.path}:{line}", ("remove one of them",)))
    read = Read(path=file.path, value=value, lines=dict(found))
    _refuse_odd(value, "", read, 0)
    return read


def _second_line(found: list[tuple[str, int]], name: str) -> int:
    seen: set[str] = set()
    for key, line in found:
        if key in seen and key.rpartition(".")[2] == name:
            return line
        seen.add(key)
    return next((line for key, line in reversed(found) if key.rpartition(".")[2] == name), 1)


def _refuse_odd(value: Any, key: str, read: Read, depth: int) -> None:
    """ConfigError for NaN, infinity, and what is nested so deep that nothing can read it."""
    if depth > _DEEPEST:
        raise ConfigError(Problem(f"{key}: nested too deep", read.where(key), ("a configuration of DeepSpeed",)))
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_odd(item, f"{key}.{name}" if key else name, read, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _refuse_odd(item, key, read, depth + 1)
    elif value in _NOT_FINITE:
        raise ConfigError(Problem(f"{key}: {value} is no JSON number", read.where(key), ("a finite number",)))


def _keys(text: str) -> list[tuple[str, int]]:
    """(path, line) of every key of a text that hjson has read, in its order; items of lists have no path of their own.

    Example:
        >>> _keys('{"a": 1, # one\\n b: {c: [2, {d: 3}]}}')
        [('a', 1), ('b', 2), ('b.c', 2)]
    """
    found: list[tuple[str, int]] = []
    path: list[str | None] = []  # None for a list and what is in it
    place = _BLANK.match(text).end()  # type: ignore[union-attr]
    inside: list[str] = []  # the open brackets
    if place < len(text) and text[place] == "{":
        place += 1
    inside.append("{")
    while inside:
        place = _BLANK.match(text, place).end()  # type: ignore[union-attr]
        if place >= len(text):
            break
        if text[place] in "}]":
            inside.pop()
            if path:
                path.pop()
            place += 1
            continue
        if inside[-1] == "{":
            name, line, place = _key(text, place)
            path.append(name)
            if None not in path:
                found.append((".".join(map(str, path)), line))
        else:
            path.append(None)
        if place < len(text) and text[place] in "{[":
            inside.append(text[place])
            place += 1
            continue
        path.pop()
        place = (_TEXT.match(text, place) or _WORD.match(text, place) or _REST.match(text, place)).end()  # type: ignore[union-attr]
    return found


def _key(text: str, place: int) -> tuple[str, int, int]:
    """A key, its line, and where its value begins."""
    match = _TEXT.match(text, place) or _BARE_KEY.match(text, place)
    end = match.end() if match else place + 1
    name = text[place:end]
    line = text.count("\n", 0, place) + 1
    place = _BLANK.match(text, end).end()  # type: ignore[union-attr]
    if place < len(text) and text[place] == ":":
        place = _BLANK.match(text, place + 1).end()  # type: ignore[union-attr]
    return name.strip("\"'"), line, place
