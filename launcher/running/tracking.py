"""Starts the processes that hand a run's numbers to TensorBoard and other trackers, and ends them with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.planning.checks import TRACKERS
from launcher.rundir import RunDir
from launcher.running.journal import JsonTail, inside, read_quietly, short_path
from launcher.running.trackers import ALWAYS

PATIENCE_S = 15.0  # at the end of a run, for what was not sent yet
POLL_S = 0.05
KILLED_S = 2.0  # after SIGKILL; a process stuck in a driver or file system does not die


@dataclass(slots=True)
class Tracking:
    """One process for each tracker; neither their slowness nor their end touches the run."""

    run: RunDir
    said: list[str] = field(default_factory=list)  # why one was not started
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _events: JsonTail = field(init=False)

    def __post_init__(self) -> None:
        self._events = JsonTail(self.run.events, from_end=True)

    @classmethod
    def start(cls, run: RunDir) -> Tracking:
        """Start them: TensorBoard's, and those that the plan in the run folder names."""
        tracking = cls(run)
        named = inside(read_quietly(run.plan), "config", "logging", "trackers")
        for name in (ALWAYS, *(known for known in TRACKERS if isinstance(named, list) and known in named)):
            try:
                tracking._processes[name] = _start(run, name)
            except OSError as error:
                tracking.said.append(f"{name}: not started: {error}")
        return tracking

    def finish(self, in_a_hurry: Callable[[], bool] = lambda: False) -> list[str]:
        """Wait a little until everything is handed over, less when somebody is in a hurry.

        Returns sentences for the person about what did not work.
        """
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        began = time.monotonic()
        deadline = began + PATIENCE_S
        late = [name for name, process in self._processes.items() if not _has_ended(process, deadline, in_a_hurry)]
        waited = f"{time.monotonic() - began:.0f} s"
        for name in late:
            _kill(self._processes[name])
        told = [line for line in self._events.read() if line.get("event") == "warning" and line.get("tracker")]
        self.said += [str(line.get("text")) for line in told]
        heard = {line["tracker"] for line in told} | set(late)
        for name, process in self._processes.items():
            if process.returncode != 0 and name not in heard:
                log = short_path(self.run.logs / "tracking.log")
                self.said.append(f"{name}: its process ended with exit code {process.returncode}: {log}")
        self.said += [f"{name}: not all was sent within {waited}; {_later(self.run, name)}" for name in late]
        return self.said


def _start(run: RunDir, name: str) -> subprocess.Popen[bytes]:
    run.logs.mkdir(exist_ok=True)
    with open(run.logs / "tracking.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "launcher.running.feed", str(run.path), name],
            stdin=subprocess.PIPE,  # its end tells the process that the run is over, or that the supervisor is gone
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only the supervisor
        )


def _has_ended(
    process: subprocess.Popen[bytes], deadline: float, in_a_hurry: Callable[[], bool] = lambda: False
) -> bool:
    while process.poll() is None:
        if time.monotonic() >= deadline or in_a_hurry():
            return False
        time.sleep(POLL_S)
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    _has_ended(process, time.monotonic() + KILLED_S)


def _later(run: RunDir, name: str) -> str:
    """What to type to send the rest."""
    folder = short_path(run.path / "trackers")
    if name == "wandb":
        return f"wandb sync {folder}/wandb/*run-*   sends the rest"
    if name == "swanlab":
        return f"swanlab sync {folder}/swanlab/run-*   sends the rest"
    return f"python -m launcher.running.feed {short_path(run.path)} {name}   sends the rest"
