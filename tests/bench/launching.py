"""Start a launcher as a user would, and count what it costs, down to processes that its children left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parents[2]
AT_START = Path(__file__).with_name("at_start")
ON_CPU = {"DS_ACCELERATOR": "cpu"}  # these hosts have no GPU
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Cost:
    """Seconds from the command to the last host's orders, and of processor time spent until then."""

    wall_s: float
    cpu_s: float


def adopt_orphans() -> None:
    """From now on processes whose parent dies become children of this one, so that none escapes the count."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> float:
    """Kill everything below this process; the processor seconds that all of it has used."""
    used = 0.0
    while pids := list(_descendants(os.getpid())):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while True:
                _, _, usage = os.wait4(-1, 0)
                used += usage.ru_utime + usage.ru_stime
        except ChildProcessError:
            pass
    return used


def _descendants(root: int) -> Iterator[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_bytes()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(name))
    waiting = [root]
    while waiting:
        children = parents.get(waiting.pop(), [])
        waiting += children
        yield from children


def until_all(argv: Sequence[str], env: dict[str, str], said: Path, times: Path, count: int, limit_s: float) -> Cost:
    """Run a command until `times` (a file of `NAME SECONDS` lines) has `count` lines, then end all of it.

    Its output goes to `said`. Raises RuntimeError when it ends before, or takes longer than `limit_s`.
    """
    times.unlink(missing_ok=True)
    with open(said, "wb") as out:
        start = time.monotonic()
        process = subprocess.Popen(
            argv, env=env, cwd=REPO, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    why = ""
    while len(lines := times.read_text().splitlines() if times.exists() else []) < count and not why:
        time.sleep(0.005)
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            why = "ended before"
        elif time.monotonic() - start > limit_s:
            why = f"took more than {limit_s:.0f} s"
    cpu_s = end_children()
    process.returncode = 0  # it was reaped above
    if why:
        raise RuntimeError(f"{argv[0]} {why}: {len(lines)} of {count}; see {said}")
    return Cost(max(float(line.split()[1]) for line in lines) - start, cpu_s)


def middle(costs: Sequence[Cost]) -> Cost:
    """The median of either number."""
    return Cost(median(cost.wall_s for cost in costs), median(cost.cpu_s for cost in costs))
