"""Standard streams that must not end a program: a reader that has gone, a text the encoding lacks."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def silence(stream: Any) -> None:
    """Let what Python still holds of `stream` go nowhere: it must not fail again when it is flushed at exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def take_any_text() -> None:
    """Print what the terminal's encoding lacks as escapes: a row's or a path's text may hold anything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
