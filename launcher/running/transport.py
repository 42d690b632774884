"""How an agent is started on a host, and how orders and events travel to it and back."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from launcher.errors import ConfigError, Problem

Event = dict[str, Any]
LOST = "lost"  # the event a link makes itself when its agent ends without a "done"


class Link:
    """One running agent: messages go to its standard input, its events arrive in `events`."""

    def __init__(self, host: str, process: subprocess.Popen[bytes], events: queue.Queue[Event]) -> None:
        self.host = host
        self.process = process
        self._events = events
        self._reader = threading.Thread(target=self._read, name=f"events of {host}", daemon=True)
        self._reader.start()

    def send(self, message: Event) -> None:
        """Send one JSON line; an agent that is gone shows itself by its event `lost`."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
            stdin.flush()
        except OSError:
            pass

    def close(self) -> None:
        """Wait for the agent to end; call it after `done` or `lost`."""
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                _close(pipe)

    def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        done = False
        for line in stdout:
            event = json.loads(line)
            done = done or event["event"] == "done"
            self._events.put(event)
        if not done:
            code = self.process.wait()
            self._events.put({"event": LOST, "host": self.host, "time": time.time(), "exit_code": code})


def start_local(host: str, events: queue.Queue[Event], *, log: Path, python: str = sys.executable) -> Link:
    """Start the agent on this machine, in its own session so that Ctrl-C does not reach it.

    Its errors go to `log`, beside the output of the node launcher.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            [python, "-m", "launcher.running.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    return Link(host, process, events)


TRANSPORTS: dict[str, Callable[..., Link]] = {"local": start_local}


def find_transport(name: str) -> Callable[..., Link]:
    """The transport that `cluster.transport` names; `auto` is local, the only one so far."""
    chosen = "local" if name == "auto" else name
    if chosen not in TRANSPORTS:
        available = ", ".join(TRANSPORTS)
        raise ConfigError(
            Problem(
                f"cluster.transport={name} is not available; available: {available}", tries=("cluster.transport=local",)
            )
        )
    return TRANSPORTS[chosen]


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except OSError:  # unsent bytes for an agent that is gone
        pass
