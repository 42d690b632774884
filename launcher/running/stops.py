"""How a run is asked to stop: by signals, through its folder, from another node."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from launcher.errors import ExitCode


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered: the first asks for a stop, the second for an end."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._here = 0
        self.first: signal.Signals | None = None
        self._by_file = 0
        self._elsewhere = 0
        self._before: dict[int, Any] = {}
        self._time_is_up = False

    def __enter__(self) -> StopSignals:
        for number in self.NUMBERS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run outlives its terminal
            self._before[number] = signal.signal(number, self._count)
        if callable(signal.getsignal(signal.SIGUSR2)):  # a batch job's, see slurm_job
            self._before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._hear_of_limit)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def count(self) -> int:
        """How often a stop was asked for, by who asked most often: a signal to all nodes at once is one."""
        return max(self._here, self._elsewhere)

    @property
    def why(self) -> str:
        """What asked for a stop, for people."""
        if self._time_is_up:
            return "the job's time limit is near"
        return self.first.name if self.first else ""

    @property
    def exit_code(self) -> int:
        """The launcher's exit code after the stop that was asked for."""
        return ExitCode.INTERRUPTED if self.first == signal.SIGINT else ExitCode.TERMINATED

    def hurry(self) -> Callable[[], bool]:
        """Says whether a stop was asked for once more since: then nobody wants to wait."""
        asked = max(self.count, 1)
        return lambda: self.count > asked

    def ask(self, number: int, times: int) -> None:
        """Take in that this signal has come to a launcher on another node, so often by now."""
        self._elsewhere = max(times, self._elsewhere)
        self.first = self.first or signal.Signals(number)

    def add_by_file(self, count: int) -> None:
        """Take in how often a stop was asked for through the run folder."""
        self._here += max(0, count - self._by_file)
        self._by_file = max(count, self._by_file)
        if count:
            self.first = self.first or signal.SIGTERM

    def _hear_of_limit(self, number: int, frame: FrameType | None) -> None:
        self._time_is_up = self.first is None
        self._before[signal.SIGUSR2](number, frame)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._here += 1
        self.first = self.first or signal.Signals(number)
