"""Which process supervises a run, written down so that others can find it and be sure that it is the same one."""

from __future__ import annotations

import os
import socket
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
    """Note that this process supervises `run`."""
    process = read_process(os.getpid())
    start = process.start if process else 0
    supervisor = Supervisor(os.getpid(), start, boot_id(), socket.gethostname(), run_id)
    write_json(run.path / "supervisor.json", asdict(supervisor))


def read_supervisor(run: RunDir) -> Supervisor | None:
    """Who supervises or supervised `run`; None when nobody did or the file is not readable."""
    try:
        data: dict[str, Any] = read_json(run.path / "supervisor.json")
        return Supervisor(**data)
    except (OSError, ValueError, TypeError):
        return None
