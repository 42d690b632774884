"""What became of a run, from what its agents reported: who failed first, why, and the exit code that follows."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import ExitCode
from launcher.rundir import RunDir
from launcher.running.failures import Failure, find_failures
from launcher.running.hang import Hang
from launcher.spec import Host


@dataclass(slots=True)
class Tally:
    """What has been reported so far; filled by `add`."""

    run: RunDir
    ranks: int
    statuses: dict[int, dict[str, Any]] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)  # of each rank, also of one that never reported
    addresses: dict[str, str] = field(default_factory=dict)  # what a host is called in messages -> its name
    port: int | None = None  # at which ranks meet
    exits: dict[int, dict[str, Any]] = field(default_factory=dict)
    launchers: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost: list[dict[str, Any]] = field(default_factory=list)
    hang: Hang | None = None
    hang_at: float = 0.0
    unheard: dict[str, dict[str, Any]] = field(default_factory=dict)  # hosts that nobody spoke to, and their `ending`
    ending: set[str] = field(default_factory=set)  # hosts that ended their ranks before their node launcher left
    survivors: list[int] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    skew: dict[str, float] = field(default_factory=dict)  # host -> seconds its clock is behind, or a message takes

    @classmethod
    def of(cls, run: RunDir, hosts: Sequence[Host], *, master_addr: str = "", port: int | None = None) -> Tally:
        """A tally for the hosts of a plan."""
        addresses = {host.address or host.name: host.name for host in hosts}
        if master_addr:
            addresses[master_addr] = hosts[0].name
        by_rank = rank_hosts(hosts)
        return cls(run, len(by_rank), hosts=by_rank, addresses=addresses, port=port)

    def add(self, event: dict[str, Any]) -> None:
        """Take in one event of an agent (see `launcher.running.agent`), again if it is said again."""
        kind, rank, host = event["event"], event.get("rank"), event["host"]
        if kind != "lost":  # that one has the supervisor's own time
            behind = event.get("received", event["time"]) - event["time"]
            self.skew[host] = min(behind, self.skew.get(host, behind))
        if rank is not None:
            self.hosts[rank] = host
        if kind == "rank" and rank is not None:
            self.statuses[rank] = event["status"]
        elif kind == "rank_exit" and rank is not None:
            self.exits.setdefault(rank, event)
        elif kind == "launcher_exit":
            self.launchers.setdefault(host, event | {"after_ending": host in self.ending})
        elif kind == "ending":
            self.ending.add(host)
            if event.get("unheard_s"):
                self.unheard.setdefault(host, event)
        elif kind == "lost":
            self.lost.append(event)
        elif kind == "done" and host not in self.done:
            self.done.add(host)
            self.survivors += event["survivors"]

    def note_hang(self, hang: Hang, now: float) -> None:
        """Take in that nothing goes on any more; `now` is the wall clock."""
        self.hang, self.hang_at = hang, now - hang.silent_s

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
        return [rank for rank, end in self.exits.items() if not end["by_us"] and not self.ended_well(rank)]

    def ended_well(self, rank: int) -> bool:
        """Whether a rank that has left was through."""
        end = self.exits[rank]
        return self.state(rank) in ("done", "stopped") and end["exit_code"] in (0, None) and end["signal"] is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How the run ended. `interrupted` is a stop in which ranks had to be killed."""

    status: str  # done | failed | stopped | interrupted
    exit_code: int
    failures: tuple[Failure, ...] = ()


def judge(tally: Tally, asked_by: signal.Signals | None) -> Verdict:
    """The verdict over a run that has ended; `asked_by` is the signal that asked the supervisor to stop."""
    found = tuple(find_failures(tally))
    if found:
        return Verdict(status="failed", exit_code=_failure_code(found[0]), failures=found)
    if tally.all_in("done"):
        return Verdict(status="done", exit_code=ExitCode.OK)
    code = ExitCode.INTERRUPTED if asked_by == signal.SIGINT else ExitCode.TERMINATED
    killed = any(
        end["by_us"] and end["signal"] == signal.SIGKILL and tally.state(rank) not in (None, "starting")
        for rank, end in tally.exits.items()
    )
    return Verdict(status="interrupted" if killed else "stopped", exit_code=code)


def _failure_code(first: Failure) -> int:
    error = first.error or {}
    if error.get("exit_code") in (ExitCode.CONFIG, ExitCode.MACHINE):
        return int(error["exit_code"])
    return first.cause.code


def rank_hosts(hosts: Sequence[Host]) -> dict[int, str]:
    """The host of each rank: hosts in their order, slot by slot."""
    return dict(enumerate(host.name for host in hosts for _ in range(host.slots)))
