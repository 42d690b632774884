"""What became of a run, from what its agents reported: who failed first, why, and the exit code that follows."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import ExitCode, MachineError
from launcher.rundir import RunDir
from launcher.running.agent import POLL_S

SHOWN_LINES = 15  # of a traceback or log

# What a rank says when another one has left it; never the first cause while there is another.
CASCADE_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
CASCADE_TEXT = re.compile(
    r"closed by peer|reset by peer|broken pipe|NCCL error|ncclRemoteError|ncclSystemError|timed out|watchdog", re.I
)
SIGNAL_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "killed, most likely by the kernel for lack of host memory",
    signal.SIGSEGV: "segmentation fault in native code",
    signal.SIGBUS: "bus error, often a full /dev/shm or disk",
    signal.SIGABRT: "aborted by native code",
    signal.SIGTERM: "ended by somebody else",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One rank, node launcher (`rank` is None) or agent that failed by itself."""

    host: str
    rank: int | None
    time: float
    log: str
    exit_code: int | None = None
    signal: int | None = None
    error: dict[str, Any] | None = None
    note: str = ""

    @property
    def is_cascade(self) -> bool:
        """Whether this looks like the echo of another rank's failure."""
        error = self.error or {}
        return error.get("type") in CASCADE_TYPES or bool(CASCADE_TEXT.search(error.get("message", "")))

    @property
    def by_user(self) -> bool:
        """Whether the message is for people and says all: the traceback would say nothing more."""
        error = self.error or {}
        return error.get("exit_code") == ExitCode.CONFIG or error.get("type") == MachineError.__name__

    @property
    def who(self) -> str:
        """Name for people."""
        return f"DeepSpeed's node launcher on {self.host}" if self.rank is None else f"rank {self.rank} on {self.host}"

    def headline(self) -> str:
        """One line: who and why."""
        if self.error is not None:
            message = str(self.error.get("message", "")).strip()
            first = message.splitlines()[0] if message else "(no message)"
            kind = "" if self.by_user else f"{self.error.get('type')}: "
            return f"{self.who} failed: {kind}{first}"
        if self.signal is not None:
            meaning = SIGNAL_MEANINGS.get(self.signal, "")
            why = f"{signal_name(self.signal)}{f': {meaning}' if meaning else ''}"
            return f"{self.who} died of {why}{f' ({self.note})' if self.note else ''}"
        code = "unknown" if self.exit_code is None else self.exit_code
        return f"{self.who} left with exit code {code}{f' {self.note}' if self.note else ''}"

    def details(self) -> list[str]:
        """The end of its traceback, or of its log when there is none."""
        if self.error is not None:
            text = str(self.error["message" if self.by_user else "traceback"]).rstrip().splitlines()
            return text[1:][:SHOWN_LINES] if self.by_user else text[-SHOWN_LINES:]  # the headline has the first line
        return tail_lines(Path(self.log), SHOWN_LINES)


@dataclass(slots=True)
class Tally:
    """What has been reported so far; filled by `add`."""

    run: RunDir
    ranks: int
    statuses: dict[int, dict[str, Any]] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    exits: dict[int, dict[str, Any]] = field(default_factory=dict)
    launchers: list[dict[str, Any]] = field(default_factory=list)
    lost: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False  # an agent began to end its ranks, for whatever reason
    survivors: list[int] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        """Take in one event of an agent (see `launcher.running.agent`)."""
        kind, rank = event["event"], event.get("rank")
        if rank is not None:
            self.hosts[rank] = event["host"]
        if kind == "rank" and rank is not None:
            self.statuses[rank] = event["status"]
        elif kind == "rank_exit" and rank is not None:
            self.exits[rank] = event
        elif kind == "launcher_exit":
            self.launchers.append(event)
        elif kind == "ending":
            self.ended = True
        elif kind == "lost":
            self.lost.append(event)
        elif kind == "done":
            self.survivors += event["survivors"]

    def state(self, rank: int) -> str | None:
        """Last state that a rank wrote down."""
        return self.statuses.get(rank, {}).get("state")

    def all_in(self, *states: str) -> bool:
        """Whether every rank's last state is one of these."""
        return all(self.state(rank) in states for rank in range(self.ranks))

    def late_deaths(self) -> list[int]:
        """Ranks that crashed after the whole run was through, while they left the process group, say."""
        if not self.all_in("done", "stopped"):
            return []
        return [rank for rank, end in self.exits.items() if not end["by_us"] and not self._ended_well(rank)]

    def _ended_well(self, rank: int) -> bool:
        end = self.exits[rank]
        return self.state(rank) in ("done", "stopped") and end["exit_code"] in (0, None) and end["signal"] is None

    def failures(self) -> list[Failure]:
        """Everything that failed by itself, the first cause first."""
        ranks = [failure for rank in range(self.ranks) if (failure := self._rank_failure(rank)) is not None]
        if self.all_in("done", "stopped"):
            return []  # what dies after that has nothing left to do, see `late_deaths`
        launchers = [f for event in self.launchers if (f := self._launcher_failure(event, ranks)) is not None]
        if any(failure.signal is not None for failure in launchers):
            ranks = [failure for failure in ranks if failure.error]  # the others died with their node launcher
        agents = [
            Failure(
                host=event["host"],
                rank=None,
                time=event["time"],
                log=str(self.run.node_log(event["host"])),
                exit_code=event["exit_code"],
                note="or was lost with the agent that started it",
            )
            for event in self.lost
        ]
        found = [*ranks, *launchers, *agents]
        return sorted(found, key=lambda failure: (failure.is_cascade, failure.time))

    def _rank_failure(self, rank: int) -> Failure | None:
        status, end = self.statuses.get(rank, {}), self.exits.get(rank)
        error = status.get("error") if status.get("state") == "failed" else None
        unseen = not self.ended and not status and end is None
        if error is None and not unseen and (end is None or end["by_us"] or self._ended_well(rank)):
            return None
        host = self.hosts.get(rank, self.launchers[0]["host"] if self.launchers else "?")
        log = self.run.log(host, rank)
        code, number = (end["exit_code"], end["signal"]) if end else (None, None)
        # A death is seen up to a poll later; an error carries its own time.
        time = status["time"] if error else (end["time"] - 2 * POLL_S if end else 0.0)
        return Failure(
            host=host,
            rank=rank,
            time=time,
            log=str(log if status else self.run.node_log(host)),
            exit_code=code if error is None else error.get("exit_code", code),
            signal=number if error is None else None,
            error=error,
            note=_note(status, end),
        )

    def _launcher_failure(self, event: dict[str, Any], others: Sequence[Failure]) -> Failure | None:
        if event["by_us"] or event["exit_code"] == 0:
            return None
        if others and event["signal"] is None:
            return None  # it passes the code of a rank on
        return Failure(
            host=event["host"],
            rank=None,
            time=event["time"] - 3 * POLL_S,  # its ranks die of it, and may be seen before it
            log=str(self.run.node_log(event["host"])),
            exit_code=event["exit_code"],
            signal=event["signal"],
            note="" if self.statuses or self.exits else "before a rank had started",
        )


def _note(status: dict[str, Any], end: dict[str, Any] | None) -> str:
    if end is not None and end["exit_code"] == 0:
        return f"at step {status.get('step', 0)}, before the run was finished"
    if end is not None and end["signal"] == signal.SIGKILL and end["oom_kills"]:
        return f"the kernel counted {end['oom_kills']} out-of-memory kills in this control group meanwhile"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How the run ended. `interrupted` is a stop in which ranks had to be killed."""

    status: str  # done | failed | stopped | interrupted
    exit_code: int
    failures: tuple[Failure, ...] = ()


def judge(tally: Tally, asked_by: signal.Signals | None) -> Verdict:
    """The verdict over a run that has ended; `asked_by` is the signal that asked the supervisor to stop."""
    failures = tuple(tally.failures())
    if failures:
        return Verdict(status="failed", exit_code=_failure_code(failures[0], tally), failures=failures)
    if tally.all_in("done"):
        return Verdict(status="done", exit_code=ExitCode.OK)
    code = ExitCode.INTERRUPTED if asked_by == signal.SIGINT else ExitCode.TERMINATED
    killed = any(
        end["by_us"] and end["signal"] == signal.SIGKILL and tally.state(rank) not in (None, "starting")
        for rank, end in tally.exits.items()
    )
    return Verdict(status="interrupted" if killed else "stopped", exit_code=code)


def _failure_code(first: Failure, tally: Tally) -> int:
    if first.exit_code in (ExitCode.CONFIG, ExitCode.MACHINE) and first.error is not None:
        return first.exit_code
    if first.rank is None and not tally.statuses and not tally.exits and not tally.lost:
        return ExitCode.MACHINE  # DeepSpeed itself could not start
    return ExitCode.TRAINING


def signal_name(number: int) -> str:
    """The name of a signal; most of the real-time ones have none.

    Example:
        >>> signal_name(9), signal_name(40)
        ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tail_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file; empty when it is not there."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode(errors="replace").rstrip().splitlines()[-count:]
    except OSError:
        return []
