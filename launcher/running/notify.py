"""Tells somebody how a run has ended: `notify.command` gets outcome.json on standard input."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

from launcher.rundir import RunDir

PATIENCE_S = 30.0
POLL_S = 0.05
RUN = "LAUNCHER_RUN_DIR"  # in the command's environment


def notify(command: Sequence[str], run: RunDir, give_up: Callable[[], bool] = lambda: False) -> list[str]:
    """Run the command, if there is one; a sentence when that fails.

    It is killed after 30 s, or when `give_up` says so.
    """
    if not command:
        return []
    try:
        why = _failure(command, run, give_up)
    except OSError as error:  # no such program, or no outcome.json to give it
        why = str(error)
    return [f"warning: notify.command: {why}"] if why else []


def _failure(command: Sequence[str], run: RunDir, give_up: Callable[[], bool]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    # A file and not a pipe: what the command leaves behind may hold a pipe open for ever.
    with open(run.outcome, "rb") as outcome, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            list(command),
            stdin=outcome,
            stdout=said,
            stderr=said,
            env={**os.environ, RUN: str(run.path)},
            start_new_session=True,
        )
        while process.poll() is None and time.monotonic() < deadline and not give_up():
            time.sleep(POLL_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "ended before it was through" if give_up() else f"not through after {PATIENCE_S:.0f} s, and killed"
        if process.returncode == 0:
            return ""
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        return f"it left with {process.returncode}" + (f": {lines[-1][:200]}" if lines else "")
