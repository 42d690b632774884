"""How Python code is run on each host, and how messages travel to it and back.

A host is behind a door: a command on this machine (ssh, srun, or Python itself) that ends in `BOOT` over plain pipes.
What runs there are programs, single files of this package that need the standard library only: they travel over
standard input, so nothing has to be installed for the launcher itself, and no text of a person is on a command line
but the interpreter's path.
"""

from __future__ import annotations

import json
import math
import os
import queue
import selectors
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launcher.running import here
from launcher.spec import ClusterConfig, Host, RunPlan

Event = dict[str, Any]
LOST = "lost"  # the event a channel makes itself when it ends without having been closed
CLOSE_S = 2.0  # for a door to end by itself once its input has ended
SAID_LINES = 20  # kept of what is no event: greetings of login scripts, tracebacks

# Reads `NAME BYTES\n` and a program, runs its main(), and again. Lines that begin with a brace are messages that came
# too late for the program before. Runs on any Python 3, so that a probe can say which one it is. The line that it ends
# first is what a login script may have printed without an end.
_BOOT = """\
import os, sys, types
sys.path[:1] = []
end = os.linesep.encode()
try: os.write(1, end)
except OSError: pass
def take(n):
    d = b""
    while len(d) < n:
        x = os.read(0, min(n - len(d), 65536))
        if not x: sys.exit()
        d += x
    return d
def line():
    d = b""
    while not d.endswith(end): d += take(1)
    return d
while True:
    w = line().split()
    if not len(w) == 2 or w[0][:1] == b"{": continue
    m = types.ModuleType(w[0].decode()); sys.modules[m.__name__] = m
    exec(compile(take(int(w[1])), m.__name__ + ".py", "exec"), m.__dict__); m.main()
"""
# On one line, without `!` and `'` or a backslash before one, since it goes through the login shell of a user: csh takes
# no line ends in quotes.
BOOT = 'exec("""' + _BOOT.replace("\n", "\\n") + '""")'
# Sources a script in bash, with its arguments, then becomes the command behind them; what it prints is no event.
ACTIVATE = 'n=$1; shift; . "${@:1:n}" >&2 || exit 96; shift "$n"; exec "$@"'


@dataclass(frozen=True, slots=True)
class Door:
    """The command on this machine that leads to Python on a host."""

    host: str
    argv: tuple[str, ...]
    local: bool  # no network between: the end of input can only mean that this side is gone


def doors(plan: RunPlan) -> dict[str, Door]:
    """The door of each host of a plan, by its transport."""
    cluster = plan.config.cluster
    inner = python_argv(cluster)
    found = {}
    for host in plan.hosts:
        if plan.transport == "slurm":
            from launcher.running.slurm import srun_argv

            found[host.name] = Door(host.name, (*srun_argv(host, plan.device), *inner), False)
        elif plan.transport == "local" or here.is_this_machine(host):
            found[host.name] = Door(host.name, inner, True)
        else:
            found[host.name] = Door(host.name, (*ssh_argv(host, cluster.connect_s), shlex.join(inner)), False)
    return found


def python_argv(cluster: ClusterConfig) -> tuple[str, ...]:
    """Command that runs BOOT on a host, inside what `cluster.wrap` and `cluster.activate` name."""
    activate: tuple[str, ...] = ()
    if cluster.activate is not None:
        words = shlex.split(cluster.activate)
        activate = ("bash", "-lc", ACTIVATE, "activate", str(len(words)), *words)
    python = cluster.python or ("python" if activate else sys.executable)
    return (*cluster.wrap, *activate, python, "-c", BOOT)


def ssh_argv(host: Host, connect_s: float) -> tuple[str, ...]:
    """An ssh that never asks: keys of hosts are checked, the user's own configuration counts."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(math.ceil(connect_s)),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ClearAllForwardings": "yes",
    }
    if host.address is not None and not _known(host.name):
        options |= {"HostName": host.address, "HostKeyAlias": host.name}
    port = ("-p", str(host.port)) if host.port is not None else ()
    user = ("-l", host.user) if host.user is not None else ()
    return ("ssh", "-T", *(f"-o{key}={value}" for key, value in options.items()), *port, *user, "--", host.name)


def _known(name: str) -> bool:
    """Whether ssh finds a machine by this name: in its configuration, or because it resolves."""
    try:
        socket.getaddrinfo(name, None)
        return True
    except OSError:
        pass
    try:
        shown = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return any(line.startswith("hostname ") and line.split()[1] != name for line in shown.splitlines())


def program_source(program: str) -> bytes:
    """The header and the source that BOOT takes."""
    source = Path(__file__).with_name(f"{program}.py").read_bytes()
    return f"{program} {len(source)}\n".encode() + source


def open_channels(plan: RunPlan, inbox: queue.Queue[Event]) -> dict[str, Channel]:
    """A channel to each host of a plan; whether somebody is there shows by the first answer, or by `lost`."""
    return {name: Channel(door, inbox) for name, door in doors(plan).items()}


def open_raw(door: Door, program: str) -> subprocess.Popen[bytes]:
    """A program behind a door with its standard streams as they are, for bytes that are no messages."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(door.argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert process.stdin is not None
    try:
        process.stdin.write(program_source(program))
        process.stdin.flush()
    except BrokenPipeError:  # its end and its errors tell
        pass
    return process


class Channel:
    """One live connection to a host: programs and messages go there, events come into the inbox."""

    reopens = True  # a new one can be made in its place

    def __init__(self, door: Door, inbox: queue.Queue[Event], *, errors: Path | None = None) -> None:
        self.door = door
        self.host = door.host
        self.local = door.local
        self.inbox = inbox
        self.over = False
        self._closed = False
        self._said: list[str] = []  # lines that are no events
        self._unread = b""
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile() if errors is None else open(errors, "a+b")  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                door.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C reaches it only through us
            )
        except OSError as error:
            self.process = subprocess.Popen(["false"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._errors.write(f"{door.argv[0]}: {error.strerror}\n".encode())
            self._errors.flush()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        _pump().add(self)

    def start(self, program: str) -> None:
        """Run launcher/running/PROGRAM.py there; the one before must have said its last."""
        self._write(program_source(program))

    def send(self, message: Event) -> None:
        """Send one message; a host that is gone shows itself by the event `lost`."""
        self._write(json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass") + b"\n")

    @property
    def idle(self) -> bool:
        """Whether all that was given to it has been sent."""
        return not self._unsent

    @property
    def reason(self) -> str:
        """Why it ended, for people: the last words of ssh or of what ran there."""
        lines = [line for line in self.errors.splitlines() if line.strip()] or self._said
        code = self.process.poll()
        how = "" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
        return "; ".join(line.strip() for line in lines[-2:]) or how or "no word"

    @property
    def errors(self) -> str:
        """All that came on its standard error, as far as it fits on some pages."""
        try:
            end = os.fstat(self._errors.fileno()).st_size
            return os.pread(self._errors.fileno(), 16384, max(0, end - 16384)).decode(errors="replace")
        except (OSError, ValueError):
            return ""

    def close(self) -> None:
        """End its input, and itself if it does not end then; no event comes any more."""
        if self._closed:
            return
        self._closed = self.over = True
        _pump().drop(self)
        for pipe in (self.process.stdin, self.process.stdout):
            _close(pipe)
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()

    def reopen(self) -> Channel | None:
        """A new connection to the same host; None where there is no way to make one."""
        return Channel(self.door, self.inbox)

    def kill(self) -> None:
        """End the door itself at once; `lost` follows."""
        self.process.kill()

    def _write(self, data: bytes) -> None:
        with self._lock:
            self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now; the pump sends the rest."""
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[: os.write(self.stdin, self._unsent[:65536])]
            except BlockingIOError:
                _pump().want(self)
            except (OSError, ValueError):
                self._unsent.clear()

    def read(self) -> bool:
        """Take in what has come; False at the end."""
        try:
            data = os.read(self.stdout, 65536)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._take(line)
        return bool(data)

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            self.inbox.put({**event, "host": self.host, "received": time.time()})
        elif line.strip():
            self._said = [*self._said, line.decode(errors="replace")][-SAID_LINES:]

    def end(self) -> None:
        """Say that it is lost, unless it was closed; called by the pump at the end of its output."""
        try:
            code: int | None = self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.over = True
        if not self._closed:
            now = time.time()
            lost = {"event": LOST, "host": self.host, "time": now, "received": now, "exit_code": code}
            self.inbox.put({**lost, "reason": self.reason})


class _Pump(threading.Thread):
    """One thread that reads, and writes what could not be sent at once, for all channels of this process."""

    def __init__(self) -> None:
        super().__init__(name="channels", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def add(self, channel: Channel) -> None:
        """Read from it from now on."""
        self._soon(lambda: self._register(channel.stdout, selectors.EVENT_READ, channel.read, channel))

    def want(self, channel: Channel) -> None:
        """Go on sending to it as soon as it takes more."""
        self._soon(lambda: self._register(channel.stdin, selectors.EVENT_WRITE, channel.flush, channel))

    def drop(self, channel: Channel) -> None:
        """Forget it; returns when nothing of it is looked at any more."""
        done = threading.Event()

        def forget() -> None:
            self._forget(channel.stdin)
            self._forget(channel.stdout)
            done.set()

        self._soon(forget)
        done.wait()

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._woken, 4096)
                    while not self._todo.empty():
                        self._todo.get()()
                    break  # the rest may be of a channel that was dropped just now
                self._serve(key)

    def _serve(self, key: selectors.SelectorKey) -> None:
        action, channel = key.data
        if action == channel.flush:
            self._forget(key.fd)  # it asks again if it has to
            action()
        elif not action():
            self._forget(key.fd)
            self._forget(channel.stdin)
            channel.end()

    def _soon(self, action: Callable[[], None]) -> None:
        self._todo.put(action)
        os.write(self._wake, b"x")

    def _register(self, fd: int, event: int, action: Callable[..., Any], channel: Channel) -> None:
        try:
            self._selector.register(fd, event, (action, channel))
        except (KeyError, ValueError, OSError):  # it is registered already, or closed
            pass

    def _forget(self, fd: Any) -> None:
        try:
            self._selector.unregister(fd)
        except (KeyError, ValueError):
            pass


_PUMPS: list[_Pump] = []


def _pump() -> _Pump:
    if not _PUMPS:
        _PUMPS.append(_Pump())
        _PUMPS[0].start()
    return _PUMPS[0]


def close_all(channels: Sequence[Channel]) -> None:
    """Close all of them in no more time than one takes."""
    threads = [threading.Thread(target=channel.close) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _close(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except OSError:  # unsent bytes for somebody who is gone
        pass
