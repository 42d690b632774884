"""Asks many hosts at the same time: one program on each, one answer to each order."""

from __future__ import annotations

import json
import queue
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping

from launcher.errors import MachineError, Problem
from launcher.running.nodechannel import NodeChannel
from launcher.running.transport import BOOT, LOST, Channel, Door, Event, close_all

HERE = "this machine"
TICK_S = 0.2
LONG_ORDER = 2**14  # bytes, from which an order is announced

GiveUp = Callable[[], bool]
Heard = Callable[[str | None, Event | None], None]


class Stopped(Exception):
    """Somebody has asked to stop."""


def never() -> bool:
    """Nobody asks to stop."""
    return False


def ignore(name: str | None, event: Event | None) -> None:
    """Nobody listens."""


def door_here() -> Door:
    """Python on this machine, in the same form as on any host."""
    return Door(HERE, (sys.executable, "-c", BOOT), True)


def with_doors(channels: Mapping[str, Channel | NodeChannel]) -> dict[str, Channel]:
    """Those behind which a program of ours can run; a launcher that was started there by somebody else takes none."""
    return {name: channel for name, channel in channels.items() if isinstance(channel, Channel)}


class Crew:
    """A program on several hosts that answers orders, `carry` unless another is named.

    Over `channels` that are open already, idle, share one inbox and have it to themselves meanwhile: they are ready
    for their next program afterwards. To the hosts behind `doors` it opens its own.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        doors: Mapping[str, Door] | None = None,
        *,
        give_up: GiveUp = never,
        program: str = "carry",
    ) -> None:
        self._inbox: queue.Queue[Event] = next((channel.inbox for channel in channels.values()), queue.Queue())
        self._given = list(channels.values())
        own = {name: Channel(door, self._inbox) for name, door in (doors or {}).items()}
        self._own = list(own.values())
        self.channels = {**own, **channels}
        self.doors = {name: channel.door for name, channel in self.channels.items()}
        self._names = {channel.host: name for name, channel in self.channels.items()}
        self._lost: dict[str, Event] = {}
        self._foreign: list[Event] = []
        self._give_up = give_up
        for channel in self.channels.values():
            channel.start(program)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._given:
            channel.send({"do": "end"})
        close_all(self._own)
        for event in [*self._foreign, *(event for event in self._lost.values() if event["host"] in self._names)]:
            self._inbox.put(event)  # for those who read it otherwise

    def ask(self, orders: Mapping[str, Event], heard: Heard = ignore) -> dict[str, Event]:
        """The answer of each host to its order; raises MachineError with all that refuse or are lost, and Stopped."""
        answers = self.try_ask(orders, heard)
        problems = [Problem(f"{name}: {why}") for name, answer in answers.items() if (why := why_not(answer))]
        if problems:
            raise MachineError(*problems, title=f"with {len(problems)} host{'s' if len(problems) != 1 else ''}")
        return answers

    def try_ask(self, orders: Mapping[str, Event], heard: Heard = ignore) -> dict[str, Event]:
        """The same, with refusals and losses among the answers; `why_not` tells them.

        `heard` gets what a host says before its answer, and (None, None) now and then.
        """
        answers = {name: event for name, event in self._lost.items() if name in orders}
        for name, order in orders.items():
            data = json.dumps(order, ensure_ascii=False).encode(errors="surrogatepass")
            if len(data) > LONG_ORDER:
                self.channels[name].send({"bytes": len(data) + 1})
            self.channels[name].send(order)
        while len(answers) < len(orders):
            if self._give_up():
                raise Stopped
            try:
                event = self._inbox.get(timeout=TICK_S)
            except queue.Empty:
                heard(None, None)
                continue
            source = self._names.get(event["host"])
            if source is None:
                self._foreign.append(event)
                continue
            if event["event"] == LOST:
                self._lost[source] = event
            if source in orders and event["event"] in (LOST, "refused", orders[source]["do"]):
                answers[source] = event
            else:
                heard(source, event)
        return {name: answers[name] for name in orders}

    def ask_all(self, order: Event, among: Iterable[str] | None = None) -> dict[str, Event]:
        """The answer of every host, or of those named, to one order."""
        return self.ask(dict.fromkeys(self.channels if among is None else among, order))

    def file_systems(self, folders: Mapping[str, str]) -> dict[str, str]:
        """Host -> the first host whose folder is the same one: itself when no other before it has it.

        Folders that are not there are made. Raises MachineError where nothing can be written in one.
        """
        if len(folders) < 2:
            return dict(zip(folders, folders, strict=True))
        token = f".launcher-mark-{uuid.uuid4().hex[:12]}"
        marks = {name: f"{token}-{number}" for number, name in enumerate(folders)}
        orders = {name: {"root": folder, "name": marks[name]} for name, folder in folders.items()}
        self.ask({name: {"do": "mark", **order} for name, order in orders.items()})
        every = list(marks.values())
        looks = self.ask({name: {"do": "look", "root": root, "names": every} for name, root in folders.items()})
        self.ask({name: {"do": "unmark", **order} for name, order in orders.items()})
        owners = {mark: name for name, mark in marks.items()}
        return {name: owners[looks[name]["names"][0]] for name in folders}


def why_not(answer: Event) -> str:
    """Why a host did not do what it was asked to; empty when it did."""
    if answer["event"] == LOST:
        return f"lost: {answer['reason']}"
    return str(answer["text"]) if answer["event"] == "refused" else ""
