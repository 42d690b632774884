"""Draws the live block at the bottom of a terminal; sentences scroll above it.

Not rich's own Live: it leaves parts of the old block behind when a terminal that folds long lines anew is made
narrower, and hides the cursor, which a killed process cannot show again.
"""

from __future__ import annotations

import os
import time
from typing import IO

from rich.console import Console
from rich.text import Text

from launcher.running.block import compose
from launcher.running.progress import Snapshot

DRAW_S = 0.25  # at least between two drawings
MESSAGES = 5  # rows that are left to sentences above the block, where the terminal has them
UP, CLEAR_LINE, CLEAR_BELOW = "\x1b[{}A", "\x1b[K", "\x1b[J"


class LiveDisplay:
    """A block of lines that fits the terminal, drawn anew when something in it has changed."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._console = Console(file=out, force_terminal=True, highlight=False)
        self._ascii = "utf" not in (getattr(out, "encoding", None) or "").lower()
        self._lines: list[Text] = []
        self._size = self._look()
        self._drawn = 0.0

    def show(self, snapshot: Snapshot) -> None:
        """Draw the block when it is not as drawn last, at most four times a second."""
        now = time.monotonic()
        if now - self._drawn < DRAW_S:
            return
        size = self._look()
        rows = max(1, size.lines - 1 - min(MESSAGES, size.lines // 3))
        columns = max(1, size.columns - 1)  # a full row may make the cursor wrap
        lines = compose(snapshot, columns=columns, rows=rows, now=time.time(), ascii_only=self._ascii)
        if lines != self._lines or size != self._size:
            self._drawn = now
            # Cleared first after a change of size, so that the terminal forgets which rows it has folded.
            self._write(self._back(size) + (CLEAR_BELOW if size != self._size else "") + self._block(lines))
            self._lines, self._size = lines, size

    def say(self, text: str) -> None:
        """Print above the block, with the time of day."""
        plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
        head = Text(time.strftime("%H:%M:%S  "), style="dim")
        style = "yellow" if plain.startswith("warning: ") else ""
        line = self._rendered(head.append(plain, style=f"not dim {style}"))
        size = self._look()
        self._write(f"{self._back(size)}{CLEAR_BELOW}{line}\n{self._block(self._lines)}")
        self._size = size

    def close(self) -> None:
        """Leave the last block standing; the cursor is below it already."""

    def _look(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._out.fileno())
        except (OSError, ValueError):
            size = os.terminal_size((0, 0))
        return os.terminal_size((size.columns or 80, size.lines or 24))

    def _back(self, size: os.terminal_size) -> str:
        """Move to where the block begins; a terminal that became narrower has folded its lines into several rows."""
        rows = sum(max(1, -(-line.cell_len // size.columns)) for line in self._lines)
        return "\r" + (UP.format(rows) if rows else "")

    def _block(self, lines: list[Text]) -> str:
        return "".join(f"{self._rendered(line)}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW

    def _rendered(self, text: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(text, soft_wrap=True, end="")
        return capture.get()

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
