"""What the launcher knows of one rank: its log, its state file, and how it is asked to stop.

Standard library only: a rank opens its status before torch is imported, so that a failed import is reported too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from launcher.rundir import RunDir

Item = TypeVar("Item")

STATES = ("starting", "running", "done", "stopped", "failed")
STEP_WRITE_S = 0.5  # a step alone is written at most this often; a new state or phase at once
BEAT_S = 2.0  # so is a sign of progress within a step
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankStatus:
    """State of one rank, kept in `ranks/RANK.json`; made with `open`, once, in the main thread."""

    def __init__(self, path: Path, rank: int, host: str) -> None:
        self.path = path
        self.stop_requested = False  # SIGTERM, SIGINT or SIGHUP came: finish the step, agree over ranks, save, exit 0
        self._written = 0.0
        self._status: dict[str, Any] = {
            "rank": rank,
            "host": host,
            "pid": os.getpid(),
            "state": "starting",
            "step": 0,
            "phase": "starting",
            "error": None,
        }

    @classmethod
    def open(cls, run: RunDir, rank: int, host: str) -> RankStatus:
        """Take over this process: log file, death with the parent, stop signals, first state written.

        File descriptors 1 and 2 go to the rank's log from here on. `kill -USR1 PID` writes the stacks of all
        threads there, as does a crash in native code.
        """
        status = cls(run.rank(rank), rank, host)
        _redirect_output(run.log(host, rank))
        die_with_parent()
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, status._ask_to_stop)
        run.ranks.mkdir(parents=True, exist_ok=True)
        status._write()
        return status

    def update(self, *, state: str | None = None, step: int | None = None, phase: str | None = None) -> None:
        """Note where this rank is. Cheap enough to be called each step."""
        if state is not None and state not in STATES:
            raise ValueError(f"state {state!r} is none of {', '.join(STATES)}")
        news = {key: value for key, value in (("state", state), ("step", step), ("phase", phase)) if value is not None}
        changed = {key for key, value in news.items() if self._status[key] != value}
        self._status.update(news)
        if changed - {"step"} or (changed and time.monotonic() - self._written >= STEP_WRITE_S):
            self._write()

    def beat(self) -> None:
        """Note that there is progress, for who looks for a hang; the main thread only. Cheap enough for each batch."""
        if time.monotonic() - self._written >= BEAT_S:
            self._write()

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, with a sign of progress before each and after the last."""
        for item in items:
            self.beat()
            yield item
        self.beat()

    def fail(self, error: BaseException, exit_code: int) -> None:
        """Note the exception that ends this rank, and print it to the log. The caller exits with `exit_code`."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        with contextlib.suppress(OSError):  # a full disk must not hide the exit code
            print(text, file=sys.stderr, flush=True)
        self._status["state"] = "failed"
        self._status["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": text,
            "exit_code": exit_code,
            "details": getattr(error, "details", None),
        }
        with contextlib.suppress(OSError):
            self._write()

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True
        # os.write, since a handler may run in the middle of a print.
        os.write(2, f"{signal.Signals(number).name}: this rank stops after the current step\n".encode())

    def _write(self) -> None:
        # Not rundir.write_atomic: it waits for the disk, and a training step must not.
        self._written = time.monotonic()
        self._status["time"] = time.time()
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        aside.write_text(json.dumps(self._status, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(aside, self.path)


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent (a rank's node launcher) ends, however that ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if _parent_is_gone():  # it died before the line above: no signal will come
        sys.exit("the node launcher of this rank is gone")


def _parent_is_gone() -> bool:
    # Not `getppid() == 1`: an orphan may be adopted by another process, and in a container the node launcher
    # itself may be process 1. Only the node launcher carries our run id.
    run_id = os.environ.get("LAUNCHER_RUN_ID")
    if run_id is None:  # started by hand
        return False
    try:
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        return f"LAUNCHER_RUN_ID={run_id}".encode() not in environment
    except PermissionError:
        # Process 1 of somebody else has adopted this one. The node launcher began the session that its ranks are in.
        return os.getppid() != os.getsid(0)
    except OSError:
        return True
