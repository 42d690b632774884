"""Which process supervises a run, written down so that others can find it and be sure that it is the same one.

Who sees the run folder from another machine asks for a stop by a file in it.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.rundir import RunDir, read_json, write_json
from launcher.running.agent import is_alive, read_process


@dataclass(frozen=True, slots=True)
class Supervisor:
    """Content of `supervisor.json`."""

    pid: int
    start: int  # clock ticks after boot: a pid alone is used again
    boot: str  # which boot the ticks count from
    host: str
    run_id: str

    @property
    def here(self) -> bool:
        """Whether it was started on this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool | None:
        """Whether it still runs; None when that cannot be seen from this machine."""
        if not self.here:
            return None
        return self.boot == boot_id() and is_alive(self.pid, self.start)


def boot_id() -> str:
    """Names the current boot of this machine, or container host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def write_supervisor(run: RunDir, run_id: str) -> None:
    """Note that this process supervises `run`; what an earlier one was asked by file is forgotten."""
    process = read_process(os.getpid())
    start = process.start if process else 0
    supervisor = Supervisor(os.getpid(), start, boot_id(), socket.gethostname(), run_id)
    before = read_supervisor(run)
    if before is None or dataclasses.replace(before, run_id=run_id) != supervisor:  # else a restart by this process
        _request(run).unlink(missing_ok=True)
    write_json(run.path / "supervisor.json", asdict(supervisor))


def read_supervisor(run: RunDir) -> Supervisor | None:
    """Who supervises or supervised `run`; None when nobody did or the file is not readable."""
    try:
        data: dict[str, Any] = read_json(run.path / "supervisor.json")
        return Supervisor(**data)
    except (OSError, ValueError, TypeError):
        return None


def ask_by_file(run: RunDir) -> int:
    """Ask the supervisor of `run` to stop, through the file system; how often it has been asked."""
    count = asked_by_file(run) + 1
    write_json(_request(run), {"count": count, "by": socket.gethostname(), "time": time.time()})
    return count


def asked_by_file(run: RunDir) -> int:
    """How often a stop was asked for by file: once to save and end, twice to end at once."""
    try:
        return int(read_json(_request(run))["count"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _request(run: RunDir) -> Path:
    return run.path / "stop_requested"
