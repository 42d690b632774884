"""Commands that are run to their end, unless somebody loses patience."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

TICK_S = 0.25


def run_to_end(argv: list[str], give_up: Callable[[], bool]) -> subprocess.CompletedProcess[str]:
    """Run a command, killed once `give_up` says so.

    In a session of its own, so that Ctrl-C reaches it only through us.
    """
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=null, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:
        while True:
            try:
                said, errors = process.communicate(timeout=TICK_S)
                return subprocess.CompletedProcess(argv, process.returncode, said, errors)
            except subprocess.TimeoutExpired:
                if give_up():
                    process.kill()
