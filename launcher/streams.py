"""Standard streams that must not end a program: a reader that has gone, a text the encoding lacks."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from typing import IO, Any

NARROWEST = 40  # columns; below that words are broken anyway


def silence(stream: Any) -> None:
    """Let what Python still holds of `stream` go nowhere: it must not fail again when it is flushed at exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def take_any_text() -> None:
    """Print what the terminal's encoding lacks as escapes: a row's or a path's text may hold anything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str, keep: str = "\n") -> str:
    """The text with escapes for control characters, but those in `keep`, and for bytes that are no UTF-8: what a row,
    a path or a variable holds must not command a terminal.

    Example:
        >>> print(printable("red\\x1b[2J\\udcff"))
        red\\x1b[2J\\udcff
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def fitted(text: str, stream: Any) -> str:
    """The text with its long lines broken between words where a terminal would break words; else as it is.

    Lines to type (`try`) stay whole, to be copied.
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        columns = 0
    return "\n".join(_folded(line, columns) for line in text.split("\n")) if columns >= NARROWEST else text


def _folded(line: str, columns: int) -> str:
    if len(line) <= columns or line.lstrip().startswith("try  "):
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


class SafeStream:
    """A text stream whose reader may leave (a closed terminal, `| head`) without ending the supervisor."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written; once that fails, nothing more is shown."""
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        """Of the stream; rich asks for it."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        """Of the stream; rich asks it for the size of the terminal."""
        return self._stream.fileno()
