"""Everything that failed by itself in a run, the first cause first, each in words for people."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import ExitCode, GpuMemoryError, MachineError, TrainingError
from launcher.running import causes
from launcher.running.agent import POLL_S
from launcher.running.causes import CAUSES, Cause
from launcher.running.hang import STACKS
from launcher.running.journal import short_path

if TYPE_CHECKING:
    from launcher.running.verdict import Tally

SHOWN_LINES = 15  # of a traceback or log
LOG_LINES = 40  # in which the reason of a death is looked for
GIB = 2**30
SSH_FAILED = 255  # what ssh leaves with when the connection, not the command, has ended
FOR_PEOPLE = (MachineError.__name__, TrainingError.__name__, GpuMemoryError.__name__)  # errors whose message says all
_ENDPOINT = re.compile(r"\[?([0-9a-fA-F:.]+|[\w.-]+)\]?(?:, |:)(\d{2,5})\b")  # ADDRESS:PORT, (ADDRESS, PORT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One rank, node launcher (`rank` is None), agent or host that failed by itself."""

    host: str
    rank: int | None
    time: float  # by the supervisor's clock
    log: str
    cause: Cause
    exit_code: int | None = None
    signal: int | None = None
    error: dict[str, Any] | None = None
    note: str = ""
    text: str = ""  # the headline, where it is not made of the above
    lines: tuple[str, ...] = ()  # likewise the details
    advice: str = ""

    @property
    def by_user(self) -> bool:
        """Whether the message is for people and says all: the traceback would say nothing more."""
        error = self.error or {}
        return error.get("exit_code") == ExitCode.CONFIG or error.get("type") in FOR_PEOPLE

    @property
    def who(self) -> str:
        """Name for people."""
        return f"DeepSpeed's node launcher on {self.host}" if self.rank is None else f"rank {self.rank} on {self.host}"

    def reason(self) -> str:
        """As `headline`, and of an error for people its first problem instead of their count."""
        lines = str((self.error or {}).get("message", "")).splitlines()
        if not self.by_user or len(lines) < 2:
            return self.headline()
        return f"{self.who} failed: {lines[1].strip()}"

    def headline(self) -> str:
        """One line: who and why."""
        if self.text:
            return self.text
        note = f" ({self.note})" if self.note else ""
        if self.error is not None:
            message = str(self.error.get("message", "")).strip()
            first = message.splitlines()[0] if message else "(no message)"
            kind = "" if self.by_user else f"{self.error.get('type')}: "
            return f"{self.who} failed: {kind}{first}{note}"
        if self.signal is not None:
            return f"{self.who} died of {causes.signal_text(self.signal)}{note}"
        code = "unknown" if self.exit_code is None else self.exit_code
        passed_on = causes.signal_of(self.exit_code)
        meaning = f", which stands for {causes.signal_text(passed_on)}" if passed_on else ""
        return f"{self.who} left with exit code {code}{meaning}{f' {self.note}' if self.note else ''}"

    def details(self) -> list[str]:
        """The end of its traceback, or of its log when there is none."""
        if self.lines:
            return list(self.lines)
        if self.error is not None:
            text = str(self.error["message" if self.by_user else "traceback"]).rstrip().splitlines()
            return text[1:][:SHOWN_LINES] if self.by_user else text[-SHOWN_LINES:]  # the headline has the first line
        return tail_lines(Path(self.log), SHOWN_LINES)


def find_failures(tally: Tally) -> list[Failure]:
    """Echoes of another failure come last, whatever their time: clocks of hosts agree only so far."""
    if tally.all_in("done", "stopped") and (not tally.lost or tally.all_in("done")):
        # What dies after that has nothing left to do, see `Tally.late_deaths`.
        return [] if tally.all_in("done") else list(_unheard(tally))
    ranks = [failure for rank in range(tally.ranks) if (failure := _rank_failure(tally, rank)) is not None]
    launchers = [f for event in tally.launchers.values() if (f := _launcher_failure(tally, event, ranks)) is not None]
    killed = {failure.host for failure in launchers if failure.signal is not None}
    # The others on its host died with their node launcher.
    ranks = [failure for failure in ranks if failure.error or failure.host not in killed]
    found = [*ranks, *launchers, *_lost_hosts(tally), *_unheard(tally), *_hangs(tally)]
    return sorted(found, key=lambda failure: (failure.cause.echo, failure.time))


def _rank_failure(tally: Tally, rank: int) -> Failure | None:
    status, end = tally.statuses.get(rank, {}), tally.exits.get(rank)
    host = tally.hosts.get(rank, "?")
    error = status.get("error") if status.get("state") == "failed" else None
    unseen = not tally.ending and not tally.lost and not tally.hang and not status and end is None
    if error is None and not unseen and (end is None or end["by_us"] or tally.ended_well(rank)):
        return None
    log = tally.run.log(host, rank) if status else tally.run.node_log(host)
    skew = tally.skew.get(host, 0.0)
    if error is not None:
        cause = causes.of_error(str(error.get("type")), str(error.get("message")), error.get("exit_code", 0))
        text, advice = _error_words(tally, rank, host, error, cause)
        code = error.get("exit_code", end["exit_code"] if end else None)
        return Failure(
            host=host,
            rank=rank,
            time=status["time"] + skew,
            log=str(log),
            cause=cause,
            exit_code=code,
            error=error,
            text=text,
            advice=advice,
        )
    code, number = (end["exit_code"], end["signal"]) if end else (None, None)
    cause = causes.of_death(code, number, "\n".join(tail_lines(log, LOG_LINES)))
    return Failure(
        host=host,
        rank=rank,
        time=end["time"] + skew - 2 * POLL_S if end else 0.0,  # a death is seen up to a poll later
        log=str(log),
        cause=cause,
        exit_code=code,
        signal=number,
        note=_note(status, end or {}),
        advice=cause.advice.format(host=host, port=tally.port),
    )


def _error_words(tally: Tally, rank: int, host: str, error: dict[str, Any], cause: Cause) -> tuple[str, str]:
    """A headline of our own where ranks could not meet, and advice, unless the message has its own."""
    message = str(error.get("message", ""))
    ends = [(address, port) for address, port in _ENDPOINT.findall(message) if address in tally.addresses]
    port = ends[0][1] if ends else tally.port
    if error.get("exit_code") == ExitCode.CONFIG or error.get("type") in FOR_PEOPLE:
        return "", ""
    text = ""
    if cause.name == "rendezvous" and ends and tally.addresses[ends[0][0]] != host:
        other, first = tally.addresses[ends[0][0]], message.splitlines()[0]
        where = f"{other} ({ends[0][0]}, port {port})"
        text = f"rank {rank} on {host} cannot reach {where}: {error.get('type')}: {first}"
    return text, cause.advice.format(host=host, port=port)


def _note(status: dict[str, Any], end: dict[str, Any]) -> str:
    if end.get("exit_code") == 0:
        return f"at step {status.get('step', 0)}, before the run was finished"
    if end.get("signal") == signal.SIGKILL and end.get("oom_kills"):
        return f"the kernel counted {end['oom_kills']} out-of-memory kills in this control group meanwhile"
    if end.get("signal") == signal.SIGKILL and end.get("oom_kills") == 0:
        return "or by somebody: the kernel counted no out-of-memory kill in this control group"
    if end.get("signal") == signal.SIGBUS and end.get("shm_free") is not None:
        return f"{end['shm_free'] / GIB:.2f} GiB were free in /dev/shm after it"
    return ""


def _launcher_failure(tally: Tally, event: dict[str, Any], ranks: list[Failure]) -> Failure | None:
    host, code, number = event["host"], event["exit_code"], event["signal"]
    if event["by_us"] or code == 0:
        return None
    if number is None and any(failure.host == host or event["after_ending"] for failure in ranks):
        return None  # it passes the code of a rank on
    if number is None and event["after_ending"] and (tally.lost or tally.hang):
        return None  # likewise, of a rank that was ended
    early = not any(tally.hosts.get(rank) == host for rank in [*tally.statuses, *tally.exits])
    log = tally.run.node_log(host)
    cause = causes.of_death(code, number, "\n".join(tail_lines(log, LOG_LINES)))
    if early:  # DeepSpeed itself could not start
        cause = dataclasses.replace(cause, code=ExitCode.MACHINE, retry=False)
    return Failure(
        host=host,
        rank=None,
        time=event["time"] + tally.skew.get(host, 0.0) - 3 * POLL_S,  # its ranks die of it, and may be seen before it
        log=str(log),
        cause=cause,
        exit_code=code,
        signal=number,
        note="before a rank had started" if early else "",
        advice=cause.advice.format(host=host, port=tally.port),
    )


def _unheard(tally: Tally) -> Iterator[Failure]:
    """Hosts that this process did not speak to for too long: it was suspended with all it had started."""
    for host, event in tally.unheard.items():
        cause = CAUSES["lost_host"]
        yield Failure(
            host=host,
            rank=None,
            time=event["time"] + tally.skew.get(host, 0.0),
            log=str(tally.run.node_log(host)),
            cause=cause,
            text=f"{host} had no word from the launcher for {event['unheard_s']:.0f} s, and stopped its ranks",
            advice=cause.advice.format(host=host),
        )


def _lost_hosts(tally: Tally) -> Iterator[Failure]:
    for event in tally.lost:
        host, code, seconds = event["host"], event["exit_code"], event.get("seconds", 0.0)
        local = code is not None and code != SSH_FAILED
        reason = event.get("reason") or ("no reason is known" if code is None else f"exit code {code}")
        if event.get("agent_gone"):
            text = f"the agent on {host} is gone, and its ranks with it: it was killed, or the host was started anew"
        elif local:
            how = f"died of {causes.signal_text(-code)}" if code < 0 else f"left with exit code {code}"
            text = f"the agent on {host} {how}: its ranks died with it"
        else:
            text = f"contact with {host} was lost{f' for {seconds:.0f} s' if seconds else ''} ({reason})"
        cause = CAUSES["agent_gone" if event.get("agent_gone") else "agent" if local else "lost_host"]
        yield Failure(
            host=host,
            rank=None,
            time=event["time"] - seconds,
            log=str(tally.run.node_log(host)),
            cause=cause,
            exit_code=None if code is None or code < 0 else code,
            signal=-code if code is not None and code < 0 else None,
            text=text,
            advice=cause.advice.format(host=host),
        )


def _hangs(tally: Tally) -> Iterator[Failure]:
    hang = tally.hang
    if hang is None:
        return
    stacks = f"the stacks of all ranks are in {short_path(tally.run.path / STACKS)}"
    yield Failure(
        host=hang.host,
        rank=hang.rank,
        time=tally.hang_at,
        log=str(tally.run.log(hang.host, hang.rank)),
        cause=CAUSES["hang"],
        text=hang.text,
        lines=(*hang.frames, stacks),
        advice=hang.advice,
    )


def tail_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file; empty when it is not there."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode(errors="replace").rstrip().splitlines()[-count:]
    except OSError:
        return []
