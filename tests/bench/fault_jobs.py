"""The same job under three launchers, each on a terminal of its own, and what is left of it on the hosts."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.rundir import RunDir
from tests.bench.launching import AT_START, ON_CPU, REPO
from tests.cluster import Cluster, Host

BIN = Path(sys.executable).parent
PROGRAM = Path(__file__).with_name("fault_rank.py")
LOG = "terminal.log"
TAG = "PYTHON_BENCH_JOB"  # DeepSpeed forwards what begins with PYTHON
# How many ssh a shell script holds, and what it does when it is told to stop, is up to its writer; this one is careful.
LOOP = """\
trap 'kill $(jobs -p) 2>/dev/null' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
code=0; node=0; pids=()
for host in "${@:2}"; do
  ssh "$host" "$1 --node-rank $node $PROGRAM_AND_ARGUMENTS" &
  pids+=($!); node=$((node + 1))
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""


class Terminal:
    """A window with a shell on a host, in which one command was typed; all that it shows goes to a file.

    As with any command a person types, the shell lives on after it, and passes on that the window was closed.
    """

    def __init__(self, host: Host, argv: Sequence[str], folder: Path, *, env: dict[str, str]) -> None:
        self.log, self._code = folder / LOG, folder / "exit_code"
        self._host, self._pid = host, 0
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        (folder / "typed").write_text(f"exec {shlex.join(argv)}\n")
        self.shell: subprocess.Popen[bytes] = host.popen(
            ["bash", "--norc", "--noprofile", "-i"],
            env={"TERM": "xterm", "PS1": "$ ", "HISTFILE": "", **env},
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_as_a_login_does,
        )
        os.close(slave)
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.type(b"bash typed; echo $? > exit_code\n")

    @property
    def pid(self) -> int:
        """Of the command; 0 until it runs, and the same when it has ended."""
        if not self._pid:
            self._pid = next((pid for pid in self._host.pids() if parent(pid) == self.shell.pid), 0)
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """Of the command, as the shell tells it; None until it has ended, and for ever when the window was closed."""
        text = self._code.read_text().strip() if self._code.exists() else ""
        return int(text) if text else None

    @property
    def ended(self) -> bool:
        """Whether the command is over."""
        return self.exit_code is not None or (self.pid != 0 and not is_alive(self.pid))

    def type(self, keys: bytes) -> None:
        """Type on it."""
        os.write(self._master, keys)

    def close(self) -> None:
        """Close the window."""
        if not self._closing.is_set():
            self._closing.set()
            self._reader.join()
            os.close(self._master)

    def _read(self) -> None:
        with open(self.log, "ab", buffering=0) as file:
            while not self._closing.is_set():
                if select.select([self._master], [], [], 0.1)[0]:
                    try:
                        file.write(os.read(self._master, 65536))
                    except OSError:  # nobody has it open any more
                        self._closing.wait()


def _as_a_login_does() -> None:
    """Take the terminal, and hear Ctrl-C: whoever started this bench in the background has switched that off."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Job:
    """One job of a cell: where it lies, how it is started and how far it is."""

    name: str
    cluster: Cluster
    folder: Path
    port: int | None  # for launchers that do not look for a free one
    env: dict[str, str] = field(default_factory=dict)
    terminal: Terminal | None = None
    steps_of: Callable[[Job], int] = lambda job: 0

    def start(self, launcher: str) -> None:
        """Type the command on the head."""
        self.folder.mkdir(parents=True)
        argv, self.steps_of = LAUNCHERS[launcher](self)
        shared = {
            **ON_CPU,
            TAG: self.name,
            "PYTHONPATH": f"{REPO}:{AT_START}",
            "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        terminal = self.terminal = Terminal(self.cluster.head, argv, self.folder, env=shared | self.env)
        if not wait_for(lambda: terminal.pid != 0 or terminal.exit_code is not None, 20):
            raise RuntimeError(f"the shell did not start {argv[0]}; see {terminal.log}")

    @property
    def hostfile(self) -> Path:
        """Two hosts of one rank each."""
        return self.cluster.hostfile(slots=1, nodes=2)

    def steps(self) -> int:
        """How many steps the slowest rank has made."""
        return self.steps_of(self)

    def rank_pid(self, rank: int) -> int:
        """The process of a rank, in this machine's numbers."""
        host = self.cluster.hosts[rank]
        own = [pid for pid in host.pids() if (e := environment(pid)).get("RANK") == str(rank) and e[TAG] == self.name]
        return next(pid for pid in own if parent(pid) not in own)

    def left(self, *, tagged: bool) -> list[str]:
        """What runs of this job, a line each; `tagged`: only what carries its name, which a remote shell does not."""
        found, shell = [], self.terminal.shell.pid if self.terminal else 0
        for host in (*self.cluster.hosts, self.cluster.head):
            for pid in host.pids():
                words = command(pid)
                mine = bool(words) and (not tagged or environment(pid).get(TAG) == self.name)
                # Not the user's shell, nor the server's end of a connection that is cut.
                if mine and pid != shell and not words[0].startswith("sshd"):
                    found.append(f"{host.name}: {shlex.join(words)[:200]}")
        return found


def deepspeed(job: Job) -> tuple[list[str], Callable[[Job], int]]:
    """`deepspeed --hostfile`, which takes pdsh; its port is given only to the second job of a host."""
    lines = "".join(f"{name}={value}\n" for name, value in job.env.items() if name.startswith("GLOO"))
    (job.folder / ".deepspeed_env").write_text(lines)
    port = [] if job.port is None else ["--master_port", str(job.port)]
    argv = [str(BIN / "deepspeed"), "--hostfile", str(job.hostfile), "--no_local_rank", *port]
    return [*argv, str(PROGRAM), str(_steps_folder(job))], _counted


def torchrun(job: Job) -> tuple[list[str], Callable[[Job], int]]:
    """torchrun on every host, by a loop of ssh."""
    forwarded = {**job.env, TAG: job.name, "PYTHONPATH": str(AT_START)}
    words = ["env", *(f"{name}={value}" for name, value in forwarded.items()), str(BIN / "torchrun")]
    words += ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", job.cluster.hosts[0].address]
    words += [] if job.port is None else ["--master-port", str(job.port)]
    script = LOOP.replace("$PROGRAM_AND_ARGUMENTS", shlex.join([str(PROGRAM), str(_steps_folder(job))]))
    hosts = [host.name for host in job.cluster.hosts[:2]]
    return ["bash", "-c", script, "torchrun-loop", shlex.join(words), *hosts], _counted


def ours(job: Job) -> tuple[list[str], Callable[[Job], int]]:
    """The digits demo on these hosts; patience is set so that a cell does not take minutes."""
    keys = {
        "cluster.hostfile": job.hostfile,
        "run.dir": job.folder / "run",
        "train.max_steps": 100_000,
        "eval.at_start": "false",
        "eval.every_steps": "null",
        "checkpoint.every_steps": "null",
        "checkpoint.export": "false",
        "cluster.hang_s": 20,
        "cluster.lost_contact_s": 15,
        "cluster.stop_grace_s": 30,
    }
    return [sys.executable, "-m", "launcher", *(f"{key}={value}" for key, value in keys.items())], _rank_states


LAUNCHERS: dict[str, Callable[[Job], tuple[list[str], Callable[[Job], int]]]] = {
    "deepspeed": deepspeed,
    "torchrun": torchrun,
    "ours": ours,
}


def _steps_folder(job: Job) -> Path:
    folder = job.folder / "steps"
    folder.mkdir()
    return folder


def _counted(job: Job) -> int:
    return min(_number(job.folder / "steps" / str(rank)) for rank in range(2))


def _number(file: Path) -> int:
    try:
        return int(file.read_text() or 0)
    except OSError:
        return 0


def _rank_states(job: Job) -> int:
    try:
        return min(int(json.loads(RunDir(job.folder / "run").rank(rank).read_text())["step"]) for rank in range(2))
    except (OSError, ValueError):
        return 0


def environment(pid: int) -> dict[str, str]:
    """What a process was started with."""
    return dict(entry.partition("=")[::2] for entry in _proc(pid, "environ"))


def command(pid: int) -> list[str]:
    """The command line of a process; empty when it is gone."""
    return _proc(pid, "cmdline")


def parent(pid: int) -> int:
    """The parent of a process, 0 when it is gone."""
    stat = "\0".join(_proc(pid, "stat"))
    return int(stat.rpartition(")")[2].split()[1]) if stat else 0


def is_alive(pid: int) -> bool:
    """Whether a process does more than wait for its exit code to be read."""
    stat = "\0".join(_proc(pid, "stat"))
    return bool(stat) and stat.rpartition(")")[2].split()[0] not in "ZX"


def _proc(pid: int, name: str) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip("\0").split("\0") if text else []


def wait_for(true: Callable[[], bool], within_s: float) -> bool:
    """Whether something became true in time."""
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
