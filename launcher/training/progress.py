"""How far something long is: a bar on a terminal, else a line now and then; each step is a sign of life."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_S = 10.0  # between two lines, and before the first: what is quick says nothing

Say = Callable[[int, int | None], None]  # done, of so many when that is known


def quiet() -> None:
    """No sign of life is wanted."""


@contextmanager
def progress(what: str, beat: Callable[[], None] = quiet) -> Iterator[Say]:
    """Gives a function that is told how much is done; `beat` is called each time."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)

            def draw(done: int, total: int | None) -> None:
                bar.update(task, completed=done, total=total)
                beat()

            yield draw
        return
    last, said = time.monotonic(), 0

    def write(done: int, total: int | None) -> None:
        nonlocal last, said
        beat()
        if time.monotonic() - last >= LINE_S and done > said:
            last, said = time.monotonic(), done
            print(f"{what}: {done:,}" + ("" if total is None else f" of {total:,}"), flush=True)

    yield write
