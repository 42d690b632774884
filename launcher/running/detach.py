"""Starts a run that goes on without its terminal: `--detach`.

The launcher starts itself again in a session of its own and passes on what that says until the run has started, so
that every error is still seen. From then on the output goes to `launcher.log` of the run folder.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO, Any

from launcher.errors import ConfigError, ExitCode, Problem
from launcher.rundir import RunDir
from launcher.running.journal import short_path

LOG = "launcher.log"


def refuse_sweep() -> ConfigError:
    """A sweep has many starts, each of which may fail: nobody would see which."""
    tries = ("nohup python -m launcher -m ... > sweep.log &", "the same inside tmux")
    return ConfigError(Problem("a sweep (-m) cannot be detached", tries=tries), title="with this command")


def start_detached(words: Sequence[str], command: Sequence[str]) -> int:
    """Run `command`, which reads an order for `leaver` from standard input, until its run has started; the exit code.

    Secrets among `words` are not on a command line, where everybody could read them.
    """
    ready, theirs = os.pipe()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        list(command), stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(theirs,), start_new_session=True
    ) as process:
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(json.dumps({"words": list(words), "ready": theirs}).encode())
        process.stdin.close()
        with _PassedOn(process), open(ready, "rb", buffering=0) as said:
            folder = _relay(process, said)
        if not folder:
            code = process.wait()
            return code if code >= 0 else int(ExitCode.INTERNAL)
        process.returncode = 0  # it is not ours to wait for
    run = short_path(folder)
    print(f"detached: process {process.pid} goes on without this terminal; what it says is in {run}/{LOG}")
    for what, verb in (("follow", "logs -f"), ("status", "status"), ("stop", "stop")):
        print(f"  {what:<7} python -m launcher {verb} {run}")
    return int(ExitCode.OK)


def _relay(process: subprocess.Popen[bytes], ready: IO[bytes]) -> str:
    """Pass on what it says until its run has started or it has ended; the run folder, empty in the second case."""
    assert process.stdout is not None and process.stderr is not None
    outs: dict[Any, IO[bytes]] = {process.stdout: sys.stdout.buffer, process.stderr: sys.stderr.buffer}
    folder = ""
    with selectors.DefaultSelector() as selector:
        for pipe in (*outs, ready):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            found = selector.select(0 if folder else None)
            if not found:
                return folder
            for key, _ in found:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is ready:
                    folder = data.decode().strip()
                else:
                    outs[key.fileobj].write(data)
                    outs[key.fileobj].flush()
    return folder


class _PassedOn:
    """Ctrl-C and SIGTERM go to the process while this is entered: it sits in a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._pass)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass(self, number: int, frame: FrameType | None) -> None:
        self._process.send_signal(number)


def leaver(order: dict[str, Any]) -> Callable[[RunDir], None]:
    """For the started process: what it calls when its run starts, to leave the terminal."""
    ready = int(order["ready"])
    os.set_inheritable(ready, False)

    def leave(run: RunDir) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(run.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, number in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, number)
        os.close(log)
        os.close(null)
        try:
            os.write(ready, f"{run.path}\n".encode())
        except BrokenPipeError:
            pass  # who started it is gone already
        os.close(ready)

    return leave
