"""Values as people type them: Hydra's grammar, and what it cannot read but can mean one thing only."""

from __future__ import annotations

import functools
import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_./@%+:-]+")  # text that Hydra and the shell read as it stands
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class Parsed:
    """One value read by Hydra's grammar: `value` for a single one, `sweep` holds several."""

    value: Any = None
    sweep: tuple[str, ...] | None = None
    quoted: bool = False
    readable: bool = True  # False: Hydra's grammar refuses the text


@functools.cache
def _parser() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def read_override(raw: str) -> Any:
    """Hydra's own `Override` for `x=raw`, None when its grammar refuses the text."""
    from hydra.errors import HydraException

    try:
        return _parser().parse_override(f"x={raw}")
    except HydraException:
        return None


def parse(raw: str) -> Parsed:
    """What Hydra's grammar makes of the text after `KEY=`."""
    from hydra.core.override_parser.types import QuotedString

    override = read_override(raw)
    if override is None:
        return Parsed(readable=False)
    if not override.is_sweep_override():
        return Parsed(value=override.value(), quoted=isinstance(override._value, QuotedString))
    if not override.is_discrete_sweep() or raw.startswith("glob("):
        return Parsed(sweep=())
    return Parsed(sweep=tuple(override.sweep_string_iterator()))


def parse_json(raw: str) -> Any:
    """The list or object that `raw` is in JSON, None when it is not."""
    if raw[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(raw)
    except ValueError:
        return None


def top_level_commas(raw: str) -> bool:
    """Whether `raw` holds a comma outside every bracket, where Hydra separates the values of a sweep.

    Example:
        >>> top_level_commas("^lo,docker0"), top_level_commas('{"a": 1, "b": 2}')
        (True, False)
    """
    depth = 0
    for char in raw:
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == "," and depth <= 0:
            return True
    return False


def pieces(raw: str) -> list[str]:
    """`raw` cut at the commas outside quotes and brackets, without blanks around the parts.

    Example:
        >>> pieces('"a,b", [0,1],c')
        ['"a,b"', '[0,1]', 'c']
    """
    found, depth, quote, before = [""], 0, "", ""
    for char in raw:
        if quote:
            quote = "" if char == quote and before != "\\" else quote
        elif char in "'\"" and before != "\\":
            quote = char
        else:
            depth += (char in _OPEN) - (char in _CLOSE)
        if char == "," and not quote and depth <= 0 and before != "\\":
            found.append("")
        else:
            found[-1] += char
        before = char
    return [piece.strip() for piece in found]


def parse_texts(raw: str) -> list[str] | None:
    """The texts of a list in brackets, each literal unless in quotes; None when `raw` is no such list.

    Example:
        >>> parse_texts('[--time=08:00:00,-f,64,"a, b"]')
        ['--time=08:00:00', '-f', '64', 'a, b']
    """
    if raw[:1] != "[" or raw[-1:] != "]":
        return None
    found = []
    for piece in pieces(raw[1:-1]) if raw[1:-1].strip() else []:
        parsed = parse(piece) if piece[:1] in ("'", '"') else Parsed()
        found.append(parsed.value if parsed.quoted else piece)
    return found


def in_quotes(text: str) -> str:
    """`text` in double quotes of Hydra's grammar, whatever it holds."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double).with_quotes()


def as_typed(value: Any) -> str:
    """`value` in Hydra's grammar, so that reading it gives the same value again."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ",".join(as_typed(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_typed(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if _BARE.fullmatch(text) and parse(text) == Parsed(value=text) and text != "None":
        return text
    return in_quotes(text)


def shell(word: str) -> str:
    """`word` in the form that a shell passes on unchanged."""
    return shlex.quote(word)
