"""Notices that no rank makes progress any more, and says which one is to blame. Pure: fed with events and times.

A rank's state file is its sign of progress: it is written anew at each step, batch, shard and chunk of data that takes
longer than `launcher.training.rankstatus.BEAT_S`. One silent rank is no hang, the others may wait for its long work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Elsewhere (imports, downloads, loading, writing the export) one call may take long, and no sign comes from within it.
BUSY = {"training", "evaluating", "saving"}
PATIENCE = 3  # times the limit, elsewhere
STACKS_S = 5.0  # for the stacks to arrive; agents wait one second for their ranks
BLIND_S = 30.0  # between two looks; after more than that we were suspended, and silence says nothing
STALE_S = 1.0  # not each of many quick steps is written down: by so much the last one that was may be of before
SHOWN_FRAMES = 8
STACKS = "stacks.txt"  # in the run folder

STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "is stuck in the kernel (state D: a disk, a network file system or a driver)",
    "Z": "is dead, and nobody has taken note of it",
    "X": "is dead, and nobody has taken note of it",
}
ADVICE = {
    "T": "kill -CONT {pid}   (on {host}, when it was stopped by hand)",
    "D": "dmesg -T   (on {host}: what the disk, file system or driver says)",
}
_COLLECTIVE = re.compile(r"torch/distributed/|deepspeed/comm/|torch/cuda/__init__\.py.* in synchronize")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.M)


@dataclass(slots=True)
class Heard:
    """What one rank said last, and when; whether its process has ended."""

    at: float
    status: dict[str, Any] = field(default_factory=dict)
    exited: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """What a process was doing: a letter of /proc, and the stacks of its threads unless it could not write them."""

    state: str
    text: str

    @property
    def main(self) -> list[str]:
        """Frames of the main thread, the innermost first: faulthandler writes that thread last."""
        start = [match.start() for match in _THREAD.finditer(self.text)]
        lines = self.text[start[-1] :].splitlines()[1:] if start else []
        return [line.strip() for line in lines if line.lstrip().startswith("File ")]

    @property
    def waits(self) -> bool:
        """Whether the main thread waits for other ranks."""
        return any(_COLLECTIVE.search(frame) for frame in self.main)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A hang and the rank to blame."""

    rank: int
    host: str
    why: str  # what is said of it
    silent_s: float
    status: dict[str, Any]
    stacks: Mapping[int, Stack] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """One sentence."""
        last = f"last at step {self.status.get('step', 0)} in {self.status.get('phase', 'starting')}"
        return f"no sign of progress for {self.silent_s:.0f} s: rank {self.rank} on {self.host} {self.why}, {last}"

    @property
    def frames(self) -> list[str]:
        """Where the rank to blame was, the innermost first."""
        stack = self.stacks.get(self.rank)
        return stack.main[:SHOWN_FRAMES] if stack else []

    @property
    def advice(self) -> str:
        """What to do, as far as the state of the process tells."""
        stack = self.stacks.get(self.rank)
        form = ADVICE.get(stack.state if stack else "", "")
        return form.format(pid=self.status.get("pid", "PID"), host=self.host)


class HangWatch:
    """Takes in every event of an attempt; `look` is called several times a second. Times are of one monotonic clock."""

    def __init__(self, hang_s: float, hosts: Mapping[int, str], now: float) -> None:
        self._hang_s = hang_s
        self._hosts = hosts  # of every rank
        self._heard = {rank: Heard(now) for rank in hosts}
        self._stacks: dict[int, Stack] = {}
        self._since = self._looked = now  # the last sign of progress; the last look
        self._asked: float | None = None  # when stacks were asked for

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Note a sign of progress, or the stacks that were asked for."""
        heard, kind = self._heard.get(event.get("rank", -1)), event["event"]
        if heard is None:
            return
        if kind == "rank" and heard.status != event["status"]:  # after a lost connection an agent says all again
            heard.at, heard.status = now, event["status"]
            self.excuse(now)
        elif kind == "rank_exit":
            heard.exited = True
        elif kind == "stacks":
            self._stacks[event["rank"]] = Stack(event["state"], event["text"])

    def excuse(self, now: float) -> None:
        """Count from now: there was progress, or something else explains the silence, such as a lost connection."""
        self._since, self._asked = now, None
        self._stacks.clear()

    def look(self, now: float) -> Literal["stacks"] | Hang | None:
        """`"stacks"` when they must be asked for, the hang once they are there, else None."""
        blind, self._looked = now - self._looked > BLIND_S, now
        if blind:
            self.excuse(now)
        active = {rank: heard for rank, heard in self._heard.items() if not heard.exited}
        if not active or now - self._since < self._limit_s(active):
            return None
        if self._asked is None:
            self._asked = now
            return "stacks"
        if now - self._asked < STACKS_S and not active.keys() <= self._stacks.keys():
            return None
        rank, why = blame(active, self._stacks)
        return Hang(
            rank=rank,
            host=self._hosts[rank],
            why=why,
            silent_s=now - self._since,
            status=active[rank].status,
            stacks=dict(self._stacks),
        )

    def _limit_s(self, active: Mapping[int, Heard]) -> float:
        """How long silence is no hang, where these ranks are."""
        busy = all(heard.status.get("phase") in BUSY for heard in active.values())
        return self._hang_s if busy else PATIENCE * self._hang_s


def blame(heard: Mapping[int, Heard], stacks: Mapping[int, Stack]) -> tuple[int, str]:
    """The rank that holds the others up, and what is said of it.

    A process that cannot run comes first, then one of which no word came though its fellows answered, one that does
    not wait for the others while they do, one at an earlier step; else the one that was silent first.
    """
    ranks = sorted(heard, key=lambda rank: heard[rank].at)
    for states in ("Tt", "D", "ZX"):
        for rank in ranks:
            if rank in stacks and stacks[rank].state and stacks[rank].state in states:
                return rank, STATES[stacks[rank].state]
    mute = [rank for rank in ranks if rank not in stacks]
    if mute and stacks:
        return mute[0], "does not answer"
    told = [rank for rank in ranks if rank in stacks and stacks[rank].main]
    outside = [rank for rank in told if not stacks[rank].waits]
    if outside and len(outside) < len(told):
        return outside[0], "does something else while the others wait for it"
    steps = {rank: int(heard[rank].status.get("step", 0)) for rank in ranks}
    behind, ahead = min(ranks, key=lambda rank: steps[rank]), max(ranks, key=lambda rank: steps[rank])
    if steps[behind] < steps[ahead] and heard[ahead].at - heard[behind].at > STALE_S:
        return behind, f"is behind the others, which are at step {steps[ahead]}"
    return ranks[0], "was silent first, and nothing else sets it apart"


def stacks_text(hang: Hang, hosts: Mapping[int, str]) -> str:
    """All stacks for a file: the rank to blame first."""
    parts = [hang.text]
    for rank in sorted(hosts, key=lambda rank: (rank != hang.rank, rank)):
        stack = hang.stacks.get(rank)
        head = f"== rank {rank} on {hosts[rank]}"
        if stack is None:
            parts.append(f"{head}: no answer")
        else:
            parts.append(f"{head}, process state {stack.state or 'unknown'}\n{stack.text.strip() or '(no stack)'}")
    return "\n\n".join(parts) + "\n"
