"""How far long transfers are: lines that are drawn anew in a terminal, else one now and then; short ones are silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import IO

PIPE_S = 10.0  # between lines where nobody can draw
DRAW_S = 0.25
QUIET_S = 2.0  # nothing is said of what takes no longer
LINES = 8  # above, the transfers are summed up in one
UP, CLEAR = "\x1b[{}A", "\x1b[K"


class Meter:
    """Bytes by label; `add` may be called from any thread, the rest from one."""

    def __init__(self, out: IO[str], totals: Mapping[str, int | None]) -> None:
        self._out = out
        self._totals = dict(totals)
        self._done = dict.fromkeys(totals, 0)
        self._start = time.monotonic()
        self._said = self._start + QUIET_S - (DRAW_S if out.isatty() else PIPE_S)
        self._drawn = 0
        self._lock = threading.Lock()

    def add(self, label: str, size: int) -> None:
        """So many bytes more."""
        with self._lock:
            self._done[label] += size

    def set(self, label: str, done: int, total: int | None) -> None:
        """So many bytes in all, of so many."""
        with self._lock:
            self._done[label], self._totals[label] = done, total

    def show(self) -> None:
        """Say how far it is, when it is time to."""
        if time.monotonic() - self._said >= (DRAW_S if self._out.isatty() else PIPE_S):
            self._say()

    def close(self) -> None:
        """Say how it ended, if anything was said or it took long."""
        if time.monotonic() - self._start >= QUIET_S:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        lines = self._lines()
        if self._out.isatty():
            up = UP.format(self._drawn) if self._drawn else ""
            self._out.write("\r" + up + "".join(f"{line}{CLEAR}\n" for line in lines))
            self._drawn = len(lines)
        else:
            self._out.write("".join(f"{line}\n" for line in lines))
        self._out.flush()

    def _lines(self) -> list[str]:
        elapsed = max(time.monotonic() - self._start, 1e-3)
        with self._lock:
            done, totals = dict(self._done), dict(self._totals)
        if len(done) > LINES:
            known = [total for total in totals.values() if total is not None]
            through = sum(1 for label, size in done.items() if size >= (totals[label] or size + 1))
            head = f"{through} of {len(done)} transfers done"
            return [_line(head, sum(done.values()), sum(known) if len(known) == len(done) else None, elapsed)]
        return [_line(label, size, totals[label], elapsed) for label, size in done.items()]


def _line(label: str, done: int, total: int | None, elapsed: float) -> str:
    of = "" if total is None else f" of {size_text(total)}"
    return f"{label}: {size_text(min(done, total) if total else done)}{of}, {done / elapsed / 1e6:,.1f} MB/s"


def files_text(count: int) -> str:
    """A number of files."""
    return f"{count:,} file{'' if count == 1 else 's'}"


def size_text(size: float) -> str:
    """Bytes as a person reads them.

    Example:
        >>> size_text(16_381_000_000), size_text(70_500)
        ('16.4 GB', '0.1 MB')
    """
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
