"""A node whose launcher follows this one, as preflight and supervision see it: with the interface of a `Channel`."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from typing import Any

from launcher.running.hello import Message, shown
from launcher.running.transport import LOST, Event


class NodeChannel:
    """Names of programs and messages go to a follower, events come into the inbox.

    No program, command or environment goes there: the follower runs its own, see `launcher.running.follower`.
    """

    local = False
    reopens = False  # it has come back by itself when contact was lost, or not at all
    idle = True  # nothing that a guard would come between

    def __init__(self, host: str, inbox: queue.Queue[Event], say: Callable[[Message], None]) -> None:
        self.host, self.inbox = host, inbox
        self.over = False
        self.reason = "no word"
        self.errors = ""
        self.stdin = os.open(os.devnull, os.O_WRONLY)  # for the supervisor's guard; a follower has its own
        self._say = say
        self._closed = False

    def start(self, program: str) -> None:
        """Have it run its own copy of launcher/running/PROGRAM.py."""
        self._say({"start": program})

    def send(self, message: Message) -> None:
        """Send one message to the program; of an order only that there is one. No environment travels."""
        if isinstance(message.get("hub"), dict):  # a question about a cache, which the follower's own variables name
            message = {**message, "hub": {**message["hub"], "env": {}}}
        if message.get("do") == "fabric":  # likewise about libraries
            message = {**message, "env": {}}
        self._say({"order": True} if "argv" in message else {"tell": message})

    def close(self) -> None:
        """Have the program end; no event comes any more."""
        if not self._closed:
            self._closed = True
            self._say({"close": True})
            os.close(self.stdin)

    def kill(self) -> None:
        """End what it runs at once; `lost` follows."""
        self._say({"kill": True})
        self.lose("it was told to end at once")

    def reopen(self) -> None:
        """None: it has come back by itself, or is lost for good."""

    def take(self, event: Any) -> None:
        """Pass on one event that the follower has sent."""
        if not isinstance(event, dict) or not isinstance(event.get("event"), str) or self._closed:
            return
        if event["event"] == LOST:
            self.lose(shown(event.get("reason", "")), event.get("exit_code"))
        else:
            self.inbox.put({"time": time.time(), **event, "host": self.host, "received": time.time()})

    def note(self, text: str) -> None:
        """Something to tell people, as an event `note`."""
        if not self._closed and not self.over:
            now = time.time()
            self.inbox.put({"event": "note", "host": self.host, "time": now, "received": now, "text": text})

    def lose(self, reason: str, exit_code: Any = None) -> None:
        """Say that it is lost, once."""
        if self._closed or self.over:
            return
        self.over, self.reason, now = True, reason, time.time()
        code = exit_code if isinstance(exit_code, int) else None
        lost = {"event": LOST, "host": self.host, "time": now, "received": now, "exit_code": code, "reason": reason}
        self.inbox.put(lost)
