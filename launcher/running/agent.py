"""Owns the processes of one run on one host: starts DeepSpeed's node launcher, watches its ranks, ends them all.

Standard library only and one file, since it is sent to hosts (`launcher.running.transport`). Descriptor 0 carries JSON
lines: first the order (the fields of `Order`), later {"do": ...} with

    stop     finish the step, save, end            fail     end soon: a rank has failed elsewhere
    kill     end at once                           gone     the supervisor has died: stop
    alive    it lives                              stacks   report what every rank is doing
    heard    `done` has arrived
    attach   over a new connection: say all again; `have` holds how much of each file has arrived

On this machine the end of input means that the supervisor is gone. On another it means that a connection was lost:
the ranks go on, and an agent that nobody has attached to for `lost_contact_s` stops them. Instead of an order may come
{"do": "attach", "socket": ...}, which joins this connection to the agent that listens there, or
{"do": "clean", "run_id": ...}, which kills what is left of a run. Descriptor 1 carries events as JSON lines:

    started        pid of the node launcher; whether the run folder is the supervisor's own; socket to attach to
    alive          the answer to alive
    attached       this connection now leads to the agent
    no_agent       nobody listens at the socket
    file           what was appended to a file of a run folder that the supervisor does not see, in base64
    stacks         state (a letter of /proc) and text of the stacks of a rank
    rank           the state file of a rank changed: its content under "status"
    rank_exit      a rank ended: exit_code or signal (both null: unknown), by_us, oom_kills (null: not told),
                   shm_free (bytes)
    ending         why all ranks are being ended: stop, kill or failure; unheard_s when nobody asked for it for so long
    launcher_exit  the node launcher ended: exit_code or signal, by_us
    monitor        what `launcher.running.monitor` saw of this machine, under "sample"
    monitor_lost   there will be no more samples: why
    done           nothing of this run is left on this host, but for the process ids under "survivors"

The way a process dies here: the agent signals ranks directly and all at once, since DeepSpeed's node launcher ends
them one by one, 30 s each. The kernel kills the node launcher with the agent, and each rank with the node launcher
(`launcher.training.rankstatus`). What is left is found by the run id in its environment, never by its name.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_ID = "LAUNCHER_RUN_ID"
HOST = "LAUNCHER_HOST"  # as the plan calls it: two of a run's hosts may be on one machine
POLL_S = 0.1  # DeepSpeed's node launcher reaps its ranks once a second; until then their exit code can be read
FAILURE_GRACE_S = 5.0  # between SIGTERM and SIGKILL when a rank has failed: all are down within 10 s
LEFTOVER_S = 5.0  # for helper processes of ranks that ended well
FINISH_S = 1800.0  # others may go on so long after the first rank is done (it may write the export)
MONITOR_END_S = 2.0  # after SIGKILL, for the monitor; it may be stuck in a driver
MONITOR_LINE = 256 * 1024  # bytes; 16 GPUs and 32 ports need 15,000
MONITOR_NONSENSE = 100  # lines without a sample among them, after which it is ended
BACKLOG = 2**20  # bytes of events for a supervisor that does not read, beyond which samples are dropped
MIRRORED = ("logs/*.log", "metrics.jsonl", "events.jsonl")  # files that only grow
CHUNK = 48 * 1024  # bytes of a file in one event
VISIBLE_S = 60.0  # for a new folder to be seen on a network file system, where it is said to be shared
STACKS_S = 1.0  # for ranks to write their stacks
PARTING_S = 5.0  # for the last events to be read
UNKILLABLE_S = 20.0  # after SIGKILL; a process stuck in a driver or file system does not die
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc shows it; pid and start together name it for good, since pids are used again."""

    pid: int
    start: int  # clock ticks after boot
    state: str = "?"
    parent: int = 0
    session: int = 0
    wait_status: int = 0  # as os.waitpid gives it; meaningful once the process is a zombie

    @property
    def ended(self) -> bool:
        """Whether only its exit code is left."""
        return self.state in "ZX"


def read_process(pid: int) -> Process | None:
    """The process with this pid, a zombie included; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()  # the name before the bracket may hold blanks and brackets
    return Process(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        wait_status=int(fields[49]),
    )


def is_alive(pid: int, start: int) -> bool:
    """Whether the process that had this pid and start time still runs."""
    process = read_process(pid)
    return process is not None and process.start == start and not process.ended


def read_environment(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty when it may not be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if b"=" in entry)
    return {key: value for key, _, value in pairs}


def processes() -> Iterator[Process]:
    """All processes of this machine."""
    for name in os.listdir("/proc"):
        process = read_process(int(name)) if name.isdigit() else None
        if process is not None:
            yield process


def find_run(run_id: str, session: int | None = None, host: str | None = None) -> list[Process]:
    """Live processes that carry `run_id` in their environment or belong to the session the run started.

    `host`: only those that were started for this host of the run.
    """

    def belongs(process: Process) -> bool:
        if process.session == session:
            return True
        environment = read_environment(process.pid)
        return environment.get(RUN_ID) == run_id and host in (None, environment.get(HOST))

    own = os.getpid()
    return [process for process in processes() if not process.ended and process.pid != own and belongs(process)]


def send(process: Process, number: signal.Signals) -> None:
    """Signal a process unless it is gone or its pid has been given to another."""
    if is_alive(process.pid, process.start):
        try:
            os.kill(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def kill_run(run_id: str, session: int | None = None, patience_s: float = UNKILLABLE_S) -> list[int]:
    """SIGKILL everything of a run on this host; returns the pids that do not die."""
    deadline = time.monotonic() + patience_s
    while left := find_run(run_id, session):
        for process in left:
            send(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            return [process.pid for process in left]
        time.sleep(0.05)
    return []


def oom_kills() -> int | None:
    """How many processes the kernel has killed for memory in the cgroup of this process; None when not told."""
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in entries:
        for file in (  # version 2, then version 1
            Path(f"/sys/fs/cgroup{path}/memory.events") if not controllers else None,
            Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control") if "memory" in controllers.split(",") else None,
        ):
            try:
                counts = dict(line.split() for line in file.read_text().splitlines()) if file else {}
            except (OSError, ValueError):
                counts = {}
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def shm_free() -> int | None:
    """Bytes that are free in /dev/shm; None when that is not told."""
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return None
    return shm.f_bavail * shm.f_frsize


@dataclass(frozen=True, slots=True)
class Order:
    """What the supervisor asks for."""

    run_id: str
    host: str  # name of this host in the plan
    run_dir: str
    cwd: str
    argv: list[str]  # of the node launcher
    env: dict[str, str]  # on top of the agent's own
    ranks: list[int]  # of this host
    stop_grace_s: float  # to finish a step and save
    monitor_every_s: float | None = None  # seconds between looks at this machine; None: none
    gpus: list[int] = field(default_factory=list)  # of the run, as the driver numbers them, in the order of local ranks
    lost_contact_s: float | None = None  # how long ranks go on without word from the supervisor; None: it is here
    files: dict[str, str] = field(default_factory=dict)  # path in the run folder -> text; none where it is shared
    adopt: bool = False  # the node launcher is started by somebody else: wait for it


class Adopted:
    """A node launcher that pdsh starts on this host, with what is used of a Popen; its exit code is not known here."""

    def __init__(self, run_id: str, host: str) -> None:
        self.pid = -1  # of no process and no session
        self.returncode: int | None = None
        self._run_id, self._host = run_id, host
        self._process: Process | None = None

    def poll(self) -> int | None:
        """None until it has come and gone."""
        if self._process is None:
            found = find_run(self._run_id, host=self._host)
            found = [process for process in found if "RANK" not in read_environment(process.pid)]
            self._process = min(found, key=lambda process: (process.start, process.pid), default=None)
            self.pid = self._process.pid if self._process else -1
        elif not is_alive(self.pid, self._process.start):
            self.returncode = 0
        return self.returncode

    def kill(self) -> None:
        """Do not wait for one that has not come."""
        if self._process is None:
            self.returncode = 0


@dataclass(slots=True)
class Rank:
    """One rank: its process once seen, its last state file, how it ended."""

    number: int
    process: Process | None = None
    status: dict[str, Any] = field(default_factory=dict)
    stamp: tuple[int, int] = (0, 0)
    exited: bool = False
    exit_code: int | None = None
    signal: int | None = None
    ending: dict[str, Any] | None = None  # as it was reported

    @property
    def loading(self) -> bool:
        """Whether it has not begun to train."""
        return self.status.get("state") in (None, "starting")

    @property
    def finished(self) -> bool:
        """Whether it said that it is through, or that it stopped as asked."""
        return self.status.get("state") in ("done", "stopped")


class Agent:
    """The run on this host, moved forward by `poll` until `over`."""

    def __init__(self, order: Order, emit: Callable[..., None]) -> None:
        self.order = order
        self.emit = emit
        self.over = False
        self.ranks = {number: Rank(number) for number in order.ranks}
        self.ending: str | None = None  # stop | failure | kill
        self.unheard_s: float | None = None  # how long nobody had spoken to it when it ended its ranks for that
        self.kill_at: float | None = None
        self.killed_at: float | None = None
        self.first_done: float | None = None
        self.launcher_over = False
        self.launcher_ending: dict[str, Any] | None = None
        self.oom_kills = oom_kills()
        self.socket = ""
        self.node_log = Path(order.run_dir, "logs", f"{order.host}.node.log")
        self.mirror = None if sees_folder(order) else make_folder(order, emit)
        self.stacks: dict[int, int] = {}  # rank -> size of its log when its stacks were asked for
        self.stacks_at = 0.0
        self.beat = time.monotonic()  # when a rank last wrote its state
        self.last: dict[str, Any] | None = None  # fields of `done`
        self.alone = False  # nobody will come back to hear how it ended
        self.heard = order.lost_contact_s is None  # what is sent may be lost on its way, but for this machine
        # "python" is the interpreter that runs this, which cluster.activate has put on the PATH
        self.argv = [sys.executable if order.argv[0] == "python" else order.argv[0], *order.argv[1:]]
        self.launcher = self._start()
        self.monitor = MonitorProcess(order, self.argv[0], emit)

    def _start(self) -> subprocess.Popen[bytes] | Adopted:
        if self.order.adopt:
            return Adopted(self.order.run_id, self.order.host)
        inherited = os.environ.get("PATH", os.defpath)
        path = os.pathsep.join([os.path.dirname(self.argv[0]), self.order.env.get("PATH", inherited)])
        self.node_log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.node_log, "ab") as log:
            return subprocess.Popen(
                self.argv,
                cwd=self.order.cwd,
                # PATH: ninja, which builds DeepSpeed's operators, lies beside the interpreter.
                env={**os.environ, **self.order.env, "PATH": path, RUN_ID: self.order.run_id, HOST: self.order.host},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=bound_to(os.getpid()),  # safe: the agent has one thread
            )

    def poll(self) -> None:
        """Look once at everything and act on it."""
        self.monitor.poll()
        self._look_at_launcher()
        self._find_ranks()
        for rank in self.ranks.values():
            self._read_status(rank)
            self._look_at_rank(rank)
        self._check_stragglers()
        self._report_stacks()
        if self.mirror is not None:
            self.mirror.poll()
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self._kill()
        self._check_over()

    def say_all(self) -> None:
        """Report everything that has been so far, to a supervisor that has missed some of it."""
        self.emit("started", pid=self.launcher.pid, shared=self.mirror is None, socket=self.socket)
        for rank in self.ranks.values():
            if rank.status:
                self.emit("rank", rank=rank.number, status=rank.status)
            if rank.ending is not None:
                self.emit("rank_exit", **rank.ending)
        if self.ending is not None:
            self.emit("ending", why=self.ending, unheard_s=self.unheard_s)
        if self.launcher_ending is not None:
            self.emit("launcher_exit", **self.launcher_ending)
        if self.last is not None:
            self.emit("done", **self.last)

    def ask_stacks(self) -> None:
        """Have every rank write its stacks to its log; they are reported a moment later."""
        for rank in self.ranks.values():
            if rank.process is not None and not rank.exited:
                self.stacks[rank.number] = _size(self._log(rank.number))
                send(rank.process, signal.SIGUSR1)
        self.stacks_at = time.monotonic() + STACKS_S

    def _report_stacks(self) -> None:
        if not self.stacks or time.monotonic() < self.stacks_at:
            return
        for number, size in self.stacks.items():
            process = self.ranks[number].process
            now = read_process(process.pid) if process else None
            text = _read_from(self._log(number), size, CHUNK).decode(errors="replace")
            self.emit("stacks", rank=number, state=now.state if now else "", text=text)
        self.stacks = {}

    def _log(self, rank: int) -> Path:
        return Path(self.order.run_dir, "logs", f"{self.order.host}.{rank}.log")

    def note(self, text: str) -> None:
        """Leave a line in the node launcher's log; a full disk must not end the agent, and the ranks with it."""
        try:
            with open(self.node_log, "a", encoding="utf-8") as log:
                print(f"launcher: {text}", file=log)
        except OSError:
            pass

    def end(self, why: str) -> None:
        """Begin to end all ranks: `stop` lets them save, `failure` is brief, `kill` is at once."""
        for rank in self.ranks.values():
            self._read_status(rank)  # one may have begun to train since the last look
        order = ("stop", "failure", "kill")
        if self.ending is not None and order.index(why) <= order.index(self.ending):
            return
        self.emit("ending", why=why, unheard_s=self.unheard_s)
        self.ending = why
        grace_s = {"stop": self.order.stop_grace_s, "failure": FAILURE_GRACE_S, "kill": 0.0}[why]
        # One that has failed is on its way out, with an exit code that a signal would replace.
        running = [
            rank.process
            for rank in self.ranks.values()
            if rank.process and not rank.exited and rank.status.get("state") != "failed"
        ]
        if why == "stop" and all(rank.loading for rank in self.ranks.values()):
            grace_s = 0.0  # nothing was trained, there is nothing to save
        if why != "kill":
            for process in running:
                send(process, signal.SIGTERM)
        self.kill_at = time.monotonic() + grace_s

    def _look_at_launcher(self) -> None:
        if self.launcher_over or self.launcher.poll() is None:
            return
        self.launcher_over = True
        code = self.launcher.returncode
        self.launcher_ending = {**_ending(code), "by_us": self.killed_at is not None}
        self.emit("launcher_exit", **self.launcher_ending)
        unseen = any(rank.process is None for rank in self.ranks.values())
        if (code != 0 or unseen) and self.ending is None:
            self.end("failure")

    def _find_ranks(self) -> None:
        missing = any(rank.process is None for rank in self.ranks.values())
        if self.launcher_over or not missing:
            return
        children = [process for process in processes() if process.parent == self.launcher.pid]
        for process in children:
            number = read_environment(process.pid).get("RANK", "")
            rank = self.ranks.get(int(number)) if number.isdigit() else None
            if rank is not None and rank.process is None:
                rank.process = process
                if self.ending is not None:
                    send(process, signal.SIGTERM)
        # A rank that is dead before the first look has no environment any more; ranks are started in their order.
        known = {rank.process.pid for rank in self.ranks.values() if rank.process}
        dead = sorted((p for p in children if p.ended and p.pid not in known), key=lambda process: process.pid)
        if dead:  # among other children of the node launcher, which asks programs this and that
            log = _read_from(self.node_log, 0, BACKLOG).decode(errors="replace")
            dead = [process for process in dead if f"process {process.pid} spawned" in log]
        unseen = [rank for rank in self.ranks.values() if rank.process is None]
        if len(dead) == len(unseen):
            for rank, process in zip(unseen, dead, strict=True):
                rank.process = process

    def _read_status(self, rank: Rank) -> None:
        path = Path(self.order.run_dir, "ranks", f"{rank.number}.json")
        try:
            stat = path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns)  # each write is a new file; the clock alone is too coarse
            if stamp == rank.stamp:
                return
            rank.status = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        rank.stamp = stamp
        self.beat = time.monotonic()
        self.emit("rank", rank=rank.number, status=rank.status)
        if rank.status.get("state") == "failed":
            self.end("failure")

    def _look_at_rank(self, rank: Rank) -> None:
        if rank.process is None or rank.exited:
            return
        now = read_process(rank.process.pid)
        if now is not None and now.start == rank.process.start and not now.ended:
            return
        rank.exited = True
        if now is not None and now.start == rank.process.start:
            code: int | None = os.waitstatus_to_exitcode(now.wait_status)
        else:
            code = self._logged_exit(rank.process.pid)
        self._read_status(rank)  # it may have written after the last look
        ending = _ending(code)
        rank.exit_code, rank.signal = ending["exit_code"], ending["signal"]
        by_us = (rank.signal == signal.SIGTERM and self.ending is not None) or self.killed_at is not None
        more = {"rank": rank.number, "pid": rank.process.pid, "by_us": by_us}
        before, now_killed = self.oom_kills, oom_kills()
        counted = None if before is None or now_killed is None else now_killed - before
        rank.ending = {**more, **ending, "oom_kills": counted, "shm_free": shm_free()}
        self.emit("rank_exit", **rank.ending)
        if not by_us and not (rank.finished and code in (0, None)):
            self.end("failure")

    def _logged_exit(self, pid: int) -> int | None:
        """The exit code that DeepSpeed's node launcher wrote down, for a rank reaped before we looked."""
        try:
            log = self.node_log.read_text(errors="replace")
        except OSError:
            return None
        if f"Process {pid} exits successfully" in log:
            return 0
        codes = re.findall(r"exits with return code = (-?\d+)", log)
        return int(codes[-1]) if codes else None

    def _processes(self) -> list[Process]:
        """What lives of the run on this host."""
        return find_run(self.order.run_id, self.launcher.pid, self.order.host)

    def _check_stragglers(self) -> None:
        if self.first_done is None and any(rank.exited for rank in self.ranks.values()):
            self.first_done = time.monotonic()
        if self.first_done is not None and time.monotonic() - self.first_done > FINISH_S and self.ending is None:
            self.end("failure")

    def _kill(self) -> None:
        if self.killed_at is None:
            self.killed_at = time.monotonic()
        for process in self._processes():
            send(process, signal.SIGKILL)
        self.launcher.kill()

    def _check_over(self) -> None:
        patience_over = self.killed_at is not None and time.monotonic() - self.killed_at > UNKILLABLE_S
        running = any(rank.process and not rank.exited for rank in self.ranks.values())
        if (running or not self.launcher_over) and not patience_over:
            return
        left = self._processes()
        if not left or patience_over:
            self.over = True
            if self.mirror is not None:
                self.mirror.finish()
            self.last = {"survivors": [process.pid for process in left] + self.monitor.end()}
            self.emit("done", **self.last)
        elif self.killed_at is None:
            self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + LEFTOVER_S)


def sees_folder(order: Order) -> bool:
    """Whether the run folder here is the one that the supervisor has written."""
    if order.lost_contact_s is None:
        return True
    deadline = time.monotonic() + (0 if order.files else VISIBLE_S)
    while True:
        try:
            if json.loads(Path(order.run_dir, "supervisor.json").read_bytes())["run_id"] == order.run_id:
                return True
        except (OSError, ValueError, LookupError, TypeError):
            pass
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)


def make_folder(order: Order, emit: Callable[..., None]) -> Mirror:
    """Make a run folder of this host's own, whose growing files are sent to the supervisor."""
    run = Path(order.run_dir)
    (run / "logs").mkdir(parents=True, exist_ok=True)
    shutil.rmtree(run / "ranks", ignore_errors=True)  # states of an earlier start
    for path, text in order.files.items():
        (run / path).write_text(text, encoding="utf-8")
    return Mirror(run, emit)


class Mirror:
    """Sends what is appended to the growing files of a run folder."""

    def __init__(self, run: Path, emit: Callable[..., None]) -> None:
        self._run = run
        self._emit = emit
        self._begins = {path: _size(path) for path in self._files()}  # what an earlier start has left was sent then
        self.sent: dict[str, int] = {}  # bytes of each file since
        self.room: Callable[[], bool] = lambda: True  # whether more may be queued

    def poll(self) -> bool:
        """Send a piece of each file that has grown; whether there was any."""
        some = False
        for path in self._files():
            name = str(path.relative_to(self._run))
            at = self.sent.get(name, 0)
            data = _read_from(path, self._begins.get(path, 0) + at, CHUNK) if self.room() else b""
            if data:
                self.sent[name] = at + len(data)
                self._emit("file", path=name, at=at, data=base64.b64encode(data).decode())
                some = True
        return some

    def finish(self) -> None:
        """Queue all the rest."""
        self.room = lambda: True
        while self.poll():
            pass

    def _files(self) -> Iterator[Path]:
        for pattern in MIRRORED:
            yield from sorted(self._run.glob(pattern))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, offset: int, count: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(count)
    except OSError:
        return b""


class MonitorProcess:
    """The process that looks at this machine: read as far as it has written, never waited for, never started again.

    It is none of the run: the run id is not in its environment, and nothing it does touches the ranks.
    """

    def __init__(self, order: Order, python: str, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._unread = b""
        self._nonsense = 0
        self._said = ""  # the last line that was no sample
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = order.monitor_every_s is None
        if order.monitor_every_s is None:
            return
        argv = [python, "-m", "launcher.running.monitor", f"--every={order.monitor_every_s}"]
        env = {**os.environ, **order.env}
        env.pop(RUN_ID, None)
        env.pop(HOST, None)
        try:
            self._process = subprocess.Popen(
                [*argv, f"--gpus={','.join(map(str, order.gpus))}", f"--run-dir={order.run_dir}"],
                cwd=order.cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # its last line is the reason when it dies
                start_new_session=True,
                preexec_fn=bound_to(os.getpid()),
            )
        except OSError as error:
            self._lose(str(error))
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def poll(self) -> None:
        """Pass on what it has written since."""
        if self._lost or self._process is None or self._process.stdout is None:
            return
        try:
            data = os.read(self._process.stdout.fileno(), 65536)
        except BlockingIOError:
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._take(line)
        if not data and self._process.poll() is not None:
            self._take(self._unread)
            ending = {name: value for name, value in _ending(self._process.returncode).items() if value is not None}
            how = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in ending.items())
            self._lose(f"it ended with {how}{f': {self._said}' if self._said else ''}")
        elif self._nonsense > MONITOR_NONSENSE or len(self._unread) > MONITOR_LINE:
            self._process.kill()
            self._lose(f"it wrote what is no sample: {self._said or repr(self._unread[:80])}")

    def end(self) -> list[int]:
        """Kill it; its pid when it does not die."""
        self._lost = True
        if self._process is None:
            return []
        self._process.kill()
        try:
            self._process.wait(MONITOR_END_S)
        except subprocess.TimeoutExpired:
            return [self._process.pid]
        return []

    def _take(self, line: bytes) -> None:
        try:
            sample = json.loads(line)
            json.dumps(sample, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but not UTF-8
        except (ValueError, RecursionError):
            sample = None
        if isinstance(sample, dict):
            self._nonsense = 0  # a library that grumbles at each look is no reason to end it
            self._emit("monitor", sample=sample)
        elif line.strip():
            self._nonsense += 1
            self._said = line[:200].decode(errors="replace").strip()

    def _lose(self, why: str) -> None:
        self._lost = True
        self._unread = b""
        self._emit("monitor_lost", why=why)


def _ending(code: int | None) -> dict[str, int | None]:
    """A return code as subprocess gives it, split into exit code and signal."""
    killed = code is not None and code < 0
    return {"exit_code": None if killed else code, "signal": -code if code is not None and killed else None}


def bound_to(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """For a child before exec: have the kernel send it `number` when `parent` ends."""
    libc = ctypes.CDLL(None)

    def in_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return in_child


class Wire:
    """JSON lines in and out, never waiting for the other side; a new connection may take the place of the first.

    A supervisor that is suspended with Ctrl-Z reads nothing; the agent must go on guarding its ranks.
    """

    def __init__(self) -> None:
        self.host = ""
        self.closed = False  # nothing more will be read
        self.broken = False  # nobody reads
        self.heard = time.monotonic()  # when something was read last
        self.unsent = bytearray()  # bytes would be copied with every event, and a suspended supervisor leaves many
        self._reader, self._writer = 0, 1
        self._received = b""
        self._listener: socket.socket | None = None
        self._folder = ""
        os.set_blocking(1, False)

    def emit(self, event: str, **fields: Any) -> None:
        """Queue one event and send what can be sent."""
        if self.broken or (event == "monitor" and not self.has_room()):
            return
        line = json.dumps({"event": event, "host": self.host, "time": time.time(), **fields}, ensure_ascii=False)
        self.unsent += line.encode(errors="replace") + b"\n"
        self.flush()

    def has_room(self) -> bool:
        """Whether what waits to be sent is little."""
        return len(self.unsent) <= BACKLOG

    def flush(self) -> None:
        """Send what can be sent; a reader that is gone is no error."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self._writer, self.unsent[:65536])]
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
            self.unsent.clear()

    def listen(self) -> str:
        """Take new connections at a socket that only this user reaches; its path."""
        self._folder = tempfile.mkdtemp(prefix="launcher-")
        path = os.path.join(self._folder, "agent")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        return path

    def messages(self, wait_s: float | None) -> list[dict[str, Any]]:
        """The messages that arrive within `wait_s`; sets `closed` at the end of input."""
        sources: list[Any] = [] if self.closed else [self._reader]
        if self._listener is not None:
            sources.append(self._listener)
        if not sources:
            time.sleep(wait_s or 0)
            return []
        ready = select.select(sources, [], [], wait_s)[0]
        if self._listener is not None and self._listener in ready:
            self._take(self._listener.accept()[0])
        if self._reader not in ready:
            return []
        try:
            data = os.read(self._reader, 65536)
        except OSError:  # reset
            data = b""
        self.closed = not data
        self.heard = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]

    def close(self) -> None:
        """Leave the descriptors as they were, for the program that comes next."""
        self.flush()
        if self._listener is not None:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._reader != 0:
            os.close(self._reader)
        os.set_blocking(1, True)

    def _take(self, connection: socket.socket) -> None:
        """Go on over a new connection."""
        if self._reader != 0:
            os.close(self._reader)
        self._reader = self._writer = connection.detach()
        os.set_blocking(self._reader, False)
        self.closed = self.broken = False
        self.unsent.clear()
        self._received = b""


def main() -> None:
    """Read the order, serve it, return when nothing of the run is left and that was said."""
    wire = Wire()
    messages: list[dict[str, Any]] = []
    while not messages:
        messages = wire.messages(None)
        if wire.closed:
            return  # nothing was ordered
    first, *rest = messages
    if first.get("do") == "attach":
        join(first, wire)
    elif first.get("do") == "clean":
        wire.emit("cleaned", survivors=kill_run(first["run_id"]))
    else:
        serve(Order(**first), wire, [message["do"] for message in rest])
    wire.close()


def serve(order: Order, wire: Wire, asked: list[str]) -> None:
    """Start what is ordered and guard it to its end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.append("stop"))
    # A function, not SIG_IGN: that would be inherited by the node launcher.
    signal.signal(signal.SIGINT, lambda *_: None)
    wire.host = order.host
    agent = Agent(order, wire.emit)
    if agent.mirror is not None:
        agent.mirror.room = wire.has_room
    if order.lost_contact_s is not None:
        agent.socket = wire.listen()
    agent.say_all()
    while not agent.over:
        _hear(agent, wire, asked)
        agent.poll()
        wire.flush()
    patience_s, ended = order.lost_contact_s or PARTING_S, time.monotonic()
    # A long log takes its time, while the other side gives signs of life.
    while not agent.alone and time.monotonic() - max(ended, wire.heard) < patience_s:
        if agent.heard and not (wire.unsent or wire.broken):
            break
        _hear(agent, wire, asked)
        wire.flush()
    if agent.alone or not agent.heard or wire.unsent or wire.broken:
        wire.close()
        sys.exit()  # the connection may hang on for hours: no program will come through it
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _hear(agent: Agent, wire: Wire, asked: list[str]) -> None:
    """Do what was asked, by messages, signals and silence."""
    limit_s = agent.order.lost_contact_s
    for message in wire.messages(POLL_S):
        if message["do"] == "attach":
            if agent.mirror is not None:
                agent.mirror.sent = dict(message["have"])  # of what is not named, nothing has arrived
                if agent.over:
                    agent.mirror.finish()
            wire.emit("attached")
            agent.say_all()
        elif message["do"] == "heard":
            agent.heard = True
        elif message["do"] == "stacks":
            agent.ask_stacks()
        elif message["do"] == "alive":
            wire.emit("alive")
        else:
            asked.append(message["do"])
            agent.alone = agent.alone or message["do"] == "gone"
    now = time.monotonic()
    silent = wire.closed if limit_s is None else now - wire.heard > limit_s
    agent.alone = agent.alone or silent
    if silent and agent.ending is None and not agent.over:
        agent.unheard_s = limit_s
        why = "the launching process is gone" if limit_s is None else f"no word from it for {limit_s:.0f} s"
        agent.note(f"{why}: the ranks are stopped")
        # Ranks that make no progress either are cut off from the others: they can neither finish the step nor save.
        stuck = limit_s is not None and now - agent.beat > limit_s / 2
        asked.append("fail" if stuck else "stop")
    while asked:
        do = asked.pop(0)
        agent.end({"fail": "failure", "gone": "stop"}.get(do, do))


def join(message: dict[str, Any], wire: Wire) -> None:
    """Pass bytes between this connection and the agent that listens at `socket`, until either ends."""
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(message["socket"])
    except OSError as error:
        wire.emit("no_agent", why=str(error))
        return
    wire.close()  # the bytes go through as they are
    line.sendall(json.dumps({"do": "attach", "have": message["have"]}).encode() + b"\n")
    while True:
        ready = select.select([0, line.fileno()], [], [])[0]
        if line.fileno() in ready:
            data = line.recv(65536)
            if not data:
                return
            os.write(1, data)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            line.sendall(data)
