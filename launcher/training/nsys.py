"""`profile=nsys`: a rank that runs inside NVIDIA Nsight Systems. Standard library only; torch is imported inside.

nsys ends itself on SIGTERM while the program in it still saves, and its own processes are between the node launcher
and the rank. So the process that the node launcher knows stays a plain one, which starts `nsys profile RANK`, hands
stop signals to the rank itself, waits until nsys has written its report, and ends as the rank did.
nsys (seen with 2022.4) hands on the exit code of the program in it, 128 + N when signal N killed that.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from launcher.errors import ExitCode, MachineError, Problem
from launcher.rundir import RunDir, append_json, read_json
from launcher.spec import RunPlan
from launcher.training.rankstatus import PR_SET_PDEATHSIG, RankStatus

GUARD = "LAUNCHER_NSYS_GUARD"  # in a rank inside nsys: pid of the process that stands for it outside
REPORTS = (".nsys-rep", ".qdstrm")  # the second where nsys comes without its importer
POLL_S = 0.1
FAILED_S = 3.0  # for the report after a failed rank: the other ranks wait for this one's end


def is_wanted(plan: RunPlan, rank: int) -> bool:
    """Whether this process is to start its rank inside nsys."""
    profile = plan.config.profile
    return profile.name == "nsys" and rank in profile.ranks and GUARD not in os.environ


def die_with_guard() -> None:
    """Inside nsys: end when the process outside ends, however that ends; nothing elsewhere."""
    if GUARD not in os.environ:
        return
    guard = int(os.environ[GUARD])
    began = _start_of(guard)

    def watch() -> None:
        while began is not None and _start_of(guard) == began:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="guard", daemon=True).start()


def command(run: RunDir, rank: int, program: list[str]) -> list[str]:
    """The nsys line around `program`."""
    return [
        shutil.which("nsys") or "nsys",
        "profile",
        "--trace=cuda,nvtx,cudnn,cublas",  # not osrt, and no symbols: they make gigabytes that training waits for
        "--resolve-symbols=false",
        "--sample=none",  # sampling the processor needs kernel settings that clusters rarely have
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--kill=none",
        "--wait=primary",
        "--force-overwrite=true",
        "--output=" + str(run.profile / f"nsys.rank{rank}").replace("%", "%%"),  # nsys expands %h, %p and others
        *program,
    ]


def stand_for(run: RunDir, rank: int, status: RankStatus, argv: list[str]) -> int:
    """Start `argv` (a line of `command`) and stay until it ended; returns the rank's exit code, or dies as it did."""
    run.profile.mkdir(exist_ok=True)
    began = time.time()
    environment = {**os.environ, GUARD: str(os.getpid())}
    # preexec_fn is safe: this process has one thread.
    nsys = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent())  # noqa: PLW1509
    asked, over_at = False, None
    while nsys.poll() is None:
        time.sleep(POLL_S)
        inside = read_json(status.path)
        if inside["pid"] == os.getpid():
            continue  # the rank in nsys has not written its state yet
        if status.stop_requested and not asked and _start_of(inside["pid"]) is not None:
            os.kill(inside["pid"], signal.SIGTERM)
            asked = True
        if over_at is None and inside["state"] == "failed":
            over_at = time.monotonic() + FAILED_S
        if over_at is not None and time.monotonic() > over_at:
            nsys.kill()
            nsys.wait()
    _tell(run, rank, began)
    return _exit_code(status, nsys.returncode)


def _exit_code(status: RankStatus, returned: int) -> int:
    """The rank's own exit code as its state file has it, else as nsys handed it on; a signal is passed on as one."""
    inside = read_json(status.path)
    if inside["pid"] == os.getpid():
        text = f"nsys ended with {returned} before the rank inside it began; the rank's log has its words"
        status.fail(MachineError(Problem(text, tries=("nsys profile true", "profile=torch"))), ExitCode.MACHINE)
        return ExitCode.MACHINE
    if inside["state"] == "failed":
        return int(inside["error"]["exit_code"])
    number = returned - 128 if returned > 128 else -returned
    if number in signal.valid_signals():
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return returned


def _tell(run: RunDir, rank: int, began: float) -> None:
    """An event with the report that nsys wrote, or a warning that it wrote none."""
    found = [f for f in sorted(run.profile.glob(f"nsys.rank{rank}.*")) if f.suffix in REPORTS]
    paths = [str(file.relative_to(run.path)) for file in found if file.stat().st_mtime >= began]
    if paths:
        how = "nsys-ui FILE, or nsys stats FILE"
        event = {"event": "profile", "tool": "nsys", "paths": paths, "open": how}
    else:
        event = {"event": "warning", "text": f"nsys wrote no report of rank {rank}; that rank's log has nsys's words"}
    try:
        append_json(run.events, {"time": time.time(), **event})
    except OSError as error:  # a full disk: the rank itself has ended, perhaps well
        print(f"{run.events} cannot be written: {error}", file=sys.stderr, flush=True)


def _die_with_parent() -> Callable[[], object]:
    """For nsys before exec: the kernel ends it with this process."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _start_of(pid: int) -> str | None:
    """When a running process started, which with its pid names it for good; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def program() -> list[str]:
    """The command line of this process, to be started again inside nsys."""
    return [sys.executable, *sys.orig_argv[1:]]
