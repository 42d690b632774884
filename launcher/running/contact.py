"""The hosts of a run at work: gives each its order, keeps contact, passes on requests, says who is lost for good."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.running.agent import Order, kill_run
from launcher.running.guard import Guard
from launcher.running.transport import LOST, Channel, Event, close_all

RETRY_S = (0.2, 1.0, 2.0, 4.0, 5.0)  # before each attempt to reach a host again; the last one goes on
CLEAN_S = 5.0  # for what is left of the run on a host that was lost
ASLEEP_S = 5.0  # between two looks, after which this process was suspended and has heard nobody
STUCK_S = 40.0  # an agent that was told to kill and does not report is ended too


@dataclass(slots=True)
class _Line:
    """What is known of one host."""

    order: Order
    channel: Channel
    guarded: bool = False
    over: bool = False
    shared: bool = True
    socket: str = ""  # where its agent takes a new connection
    heard: float = field(default_factory=time.time)  # when its last event came; agents answer the guard's pings
    lost: bool = False  # for good
    lost_at: float | None = None
    reason: str = ""  # why contact was lost
    tries: int = 0
    retry_at: float = 0.0


class Contact:
    """All hosts of an attempt; `take` sees each event first, `tick` is called several times a second."""

    def __init__(
        self,
        orders: Sequence[Order],
        channels: Mapping[str, Channel],
        have: Mapping[str, dict[str, int]],  # host -> bytes of each file that have arrived, see `mirror`
        note: Callable[..., None],  # takes the name and fields of an event of the run
    ) -> None:
        self._cleaning: dict[str, tuple[Channel, float]] = {}  # lost hosts that are tried once more, and until when
        self._survivors: list[int] = []
        self._have, self._note = have, note
        self._lines = {order.host: _Line(order, channels[order.host]) for order in orders}
        self._asked: str | None = None
        self._kill_sent: float | None = None
        self._ticked = time.time()
        # Hosts without a number are on this machine.
        self._patience_s = min((order.lost_contact_s for order in orders if order.lost_contact_s), default=0.0)
        away = any(not line.channel.local for line in self._lines.values())
        self._guard = Guard(self._patience_s) if away else None
        for line in self._lines.values():
            line.channel.start("agent")
            line.channel.send(asdict(line.order))

    @property
    def over(self) -> bool:
        """Whether every host has reported its end, or is lost."""
        return all(line.over for line in self._lines.values())

    @property
    def some_lost(self) -> bool:
        """Whether a host is out of contact at present."""
        return any(line.lost_at is not None and not line.over for line in self._lines.values())

    @property
    def channels(self) -> dict[str, Channel]:
        """The connections as they are now: some may have been opened anew."""
        return {host: line.channel for host, line in self._lines.items()}

    @property
    def at_work(self) -> list[str]:
        """Hosts that have not reported their end."""
        return [host for host, line in self._lines.items() if not line.over]

    @property
    def unshared(self) -> list[str]:
        """Hosts that do not see this run folder."""
        return [host for host, line in self._lines.items() if not line.shared]

    def take(self, event: Event) -> Event | None:
        """Note what an event says about contact; the event when it also says something about the run."""
        line, kind = self._lines[event["host"]], event["event"]
        line.heard = line.heard if kind == LOST else event["received"]
        if kind == "cleaned" or (kind == LOST and line.lost):
            self._take_cleaned(event)
            return None
        if kind == LOST:  # unless of a connection that another has replaced
            return self._lose(line, event) if line.channel.over else None
        if kind == "no_agent":
            return self._give_up(line, f"its agent is gone: {event['why']}", agent_gone=True)
        if kind == "alive":
            return None
        if kind == "attached":
            self._note("contact_back", host=line.order.host, seconds=time.time() - (line.lost_at or 0))
            line.lost_at = None
            line.tries = 0
            if self._asked is not None:
                line.channel.send({"do": self._asked})
            return None
        if kind == "started":
            line.socket, line.shared = event["socket"], event["shared"]
        if kind == "done":
            line.over = True
            line.channel.send({"do": "heard"})
        return event

    def tick(self) -> list[Event]:
        """Try to reach hosts again; events about those that are lost for good."""
        if self._kill_sent is not None and time.monotonic() - self._kill_sent > STUCK_S:
            for line in self._lines.values():
                if not line.over:
                    line.channel.kill()
        if self._guard is not None and self._guard.over:
            self._guard.close()
            self._guard = Guard(self._patience_s)
            for line in self._lines.values():
                line.guarded = False
        given_up: list[Event] = []
        now = time.time()
        asleep, self._ticked = now - self._ticked > ASLEEP_S, now
        for line in self._lines.values():
            line.heard = now if asleep else line.heard
            silent = not line.channel.local and now - line.heard > (line.order.lost_contact_s or math.inf)
            if line.over:
                continue
            if line.lost_at is None and silent:
                given_up.append(self._give_up(line, "no word from it"))
            elif line.lost_at is not None:
                given_up += self._retry(line)
            elif self._guard and not line.guarded and line.channel.idle and not line.channel.local:
                self._guard.watch(line.order.host, line.channel.stdin)
                line.guarded = True
        return given_up

    def tell(self, do: str) -> None:
        """Send a message to every host that is not done; one that is out of contact gets it when it is back."""
        if do in ("stop", "fail", "kill"):
            self._asked = do
        if do == "kill":
            self._kill_sent = time.monotonic()
        for line in self._lines.values():
            if not line.over and line.lost_at is None:
                line.channel.send({"do": do})

    def close(self, inbox: queue.Queue[Event]) -> list[int]:
        """Leave the guard, and kill what is left on hosts that were lost; processes that do not die."""
        if self._guard is not None:
            self._guard.close()
        for line in self._lines.values():
            if line.over and line.lost and line.channel.local:
                self._survivors += kill_run(line.order.run_id)
        while self._cleaning and time.monotonic() < max(deadline for _, deadline in self._cleaning.values()):
            try:
                self.take(inbox.get(timeout=0.2))
            except queue.Empty:
                continue
        close_all([channel for channel, _ in self._cleaning.values()])
        return self._survivors

    def _lose(self, line: _Line, event: Event) -> Event | None:
        if line.over:
            return None
        if line.channel.local or not line.channel.reopens or not line.socket:
            return self._give_up(line, event["reason"], event["exit_code"])
        if line.lost_at is None:
            line.lost_at, line.reason, line.tries = line.heard, event["reason"], 0
            self._note("contact_lost", host=line.order.host, reason=line.reason)
        line.retry_at = time.time() + RETRY_S[min(line.tries, len(RETRY_S) - 1)]
        line.tries += 1
        return None

    def _retry(self, line: _Line) -> list[Event]:
        assert line.lost_at is not None
        if time.time() - line.lost_at > (line.order.lost_contact_s or 0):
            return [self._give_up(line, line.reason)]
        if not line.channel.over or time.time() < line.retry_at:
            return []
        again = line.channel.reopen()
        if again is None:
            return [self._give_up(line, line.reason)]
        line.channel.close()
        line.channel, line.guarded = again, False
        again.start("agent")
        again.send({"do": "attach", "socket": line.socket, "have": self._have.get(line.order.host, {})})
        return []

    def _take_cleaned(self, event: Event) -> None:
        """A lost host has been looked at once more, or cannot be."""
        channel, _ = self._cleaning.pop(event["host"], (None, 0.0))
        if channel is not None:
            self._survivors += event.get("survivors", [])
            channel.close()

    def _give_up(self, line: _Line, reason: str, code: int | None = None, **more: Any) -> Event:
        line.over = line.lost = True
        again = None if line.channel.local else line.channel.reopen()
        if again is not None:  # what the run has there is killed, should the host answer again
            line.channel.kill()  # it leads to the old agent, and another start must not take it
            line.channel.close()
            again.start("agent")
            again.send({"do": "clean", "run_id": line.order.run_id})
            self._cleaning[line.order.host] = again, time.monotonic() + CLEAN_S
        now = time.time()
        seconds = now - (line.heard if line.lost_at is None else line.lost_at)
        fields: dict[str, Any] = {"exit_code": code, "reason": reason, "seconds": seconds, **more}
        return {"event": LOST, "host": line.order.host, "time": now, "received": now, **fields}
