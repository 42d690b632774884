"""Questions to the probes of many hosts at once; a host that does not answer is an answer too."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.running.crew import TICK_S, GiveUp, Stopped, never
from launcher.running.nodechannel import NodeChannel
from launcher.running.transport import LOST, Channel, Event

LOOK_S = 30.0  # for the first answer of a probe that runs; the driver of eight GPUs may have to start up
SLACK_S = 2.0  # ssh gives up by itself after cluster.connect_s, and says why


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """Why a host gives no answer: what was said on its connection, and the exit code of that, or None."""

    said: str
    exit_code: int | None = None


class Panel:
    """The probes of a plan's hosts. A host that falls silent is in `silent` and is not asked again."""

    def __init__(self, channels: Mapping[str, Channel | NodeChannel], give_up: GiveUp = never) -> None:
        self._channels, self._give_up = channels, give_up
        self._inbox = next(iter(channels.values())).inbox
        self._numbers = itertools.count(1)
        self.silent: dict[str, Silence] = {}
        self.reached_after_s: dict[str, float] = {}  # from the start to the first word

    def start(self, message: Event, connect_s: float, program: str = "probe") -> dict[str, Any]:
        """Start the probes and ask all the same; host -> value."""
        self._began = time.monotonic()
        for channel in self._channels.values():
            channel.start(program)
        return self._collect(dict.fromkeys(self._channels, message), LOOK_S, connect_s + SLACK_S)

    def ask(self, messages: Mapping[str, Event], wait_s: float) -> dict[str, Any]:
        """Ask each host its own; host -> value, without those that are silent."""
        return self._collect({host: m for host, m in messages.items() if host not in self.silent}, wait_s, 0.0)

    def end(self) -> None:
        """End all probes, so that other programs can be started on the channels."""
        for host, channel in self._channels.items():
            if host not in self.silent:
                channel.send({"do": "end"})
        waiting = set(self._channels) - set(self.silent)
        deadline = time.monotonic() + SLACK_S
        while waiting and (event := self._next(deadline)) is not None:
            if event["event"] in ("bye", LOST):
                waiting.discard(event["host"])

    def _collect(self, messages: Mapping[str, Event], wait_s: float, connect_s: float) -> dict[str, Any]:
        """The answers that come in time; `connect_s`: for the first word, when there was none before."""
        number = next(self._numbers)
        due: dict[str, float] = {}
        for host, message in messages.items():
            channel = self._channels[host]
            if channel.over:  # it ended in an earlier check
                self.silent[host] = Silence(said=channel.reason)
                continue
            channel.send({**message, "id": number})
            due[host] = time.monotonic() + (wait_s if host in self.reached_after_s else connect_s)
        values: dict[str, Any] = {}
        while due:
            event = self._next(min(due.values()))
            now = time.monotonic()
            if event is None:
                for host in [host for host, deadline in due.items() if deadline <= now]:
                    met = host in self.reached_after_s
                    said = f"no answer within {wait_s if met else connect_s:.0f} s"
                    self.silent[host] = Silence(said=f"{self._channels[host].errors}\n{said}".strip())
                    del due[host]
                continue
            host = event["host"]
            if event["event"] == LOST and not (host in self._channels and self._channels[host].over):
                continue  # of a connection that another has replaced, or of a host that is not asked
            if event["event"] == "hello":
                self.reached_after_s[host] = now - self._began
                due[host] = now + wait_s
            elif event["event"] == LOST:
                said = self._channels[host].errors.strip() or event["reason"]
                self.silent[host] = Silence(said=said, exit_code=event["exit_code"])
                due.pop(host, None)
            elif event["event"] == "answer" and event["id"] == number:
                values[host] = _stamped(event)
                due.pop(host, None)
        return values

    def _next(self, deadline: float) -> Event | None:
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._inbox.get(timeout=min(left, TICK_S))
            except queue.Empty:
                if self._give_up():
                    raise Stopped from None
                if left <= TICK_S:
                    return None


def _stamped(event: Event) -> Any:
    """The value of an answer; where the host's clock is told, with how far it is ahead of ours."""
    value = event["value"]
    if isinstance(value, dict) and "time" in value:
        return {**value, "ahead_s": event["time"] - event.get("received", time.time())}
    return value
