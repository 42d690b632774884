"""One start of the ranks of a run, watched to its end: what hosts say is kept, shown and acted on."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from launcher.rundir import RunDir, append_json, write_atomic
from launcher.running.agent import Order
from launcher.running.child import TICK_S
from launcher.running.contact import Contact
from launcher.running.hang import STACKS, Hang, HangWatch, stacks_text
from launcher.running.journal import short_path
from launcher.running.mirror import Mirror
from launcher.running.progress import Display, Progress
from launcher.running.stops import StopSignals
from launcher.running.supervisor import asked_by_file
from launcher.running.transport import LOST, Channel, Event
from launcher.running.verdict import Tally


def watch(
    orders: Sequence[Order],
    channels: dict[str, Channel],
    inbox: queue.Queue[Event],
    tally: Tally,
    stop: StopSignals,
    display: Display,
    *,
    hang_s: float,
    poll_runner: Callable[[Collection[str]], list[Event]],
) -> list[str]:
    """Until the last host has reported its end; hosts that do not share the run folder.

    `channels` are then those that are open. `poll_runner` tells of hosts that fail because of who started their ranks.
    """
    progress = Progress(tally.run, display)

    def note(event: str, **fields: Any) -> None:
        """The display puts it in words, and `status` reads it."""
        with suppress(OSError):  # a full disk must not end supervision
            append_json(tally.run.events, {"time": time.time(), "event": event, **fields})

    mirror, samples = Mirror(tally.run, display.say), _Samples(tally.run, progress, display.say)
    contact = Contact(orders, channels, mirror.have, note)
    asked = _Asked(contact, stop, orders[0].stop_grace_s, display.say)
    hangs = HangWatch(hang_s, tally.hosts, time.monotonic())
    failed = False

    def fail(why: str) -> None:
        nonlocal failed
        if not failed:
            display.say(f"{why}: ending the others")
            contact.tell("fail")
        failed = True

    while not contact.over:
        for event in _wait(inbox):
            mirror.take(event)
            samples.take(event)
            known = contact.take(event)
            if known is not None:
                tally.add(known)
                hangs.take(known, time.monotonic())
                if known["event"] == LOST or (known["event"] == "ending" and known["why"] == "failure"):
                    fail(_what_failed(known))
        for event in [*contact.tick(), *poll_runner({*contact.at_work} - tally.ending)]:
            tally.add(event)
            fail(_what_failed(event))
        stop.add_by_file(asked_by_file(tally.run))
        asked.pass_on()
        if not failed and not stop.count:
            failed = _look_for_hang(hangs, contact, tally, display.say)
        progress.update(tally.statuses)
    tally.survivors += contact.close(inbox)
    channels.update(contact.channels)
    return contact.unshared


def _look_for_hang(hangs: HangWatch, contact: Contact, tally: Tally, say: Callable[[str], None]) -> bool:
    """Whether nothing goes on any more; then all ranks are being ended."""
    now = time.monotonic()
    if contact.some_lost:
        hangs.excuse(now)
    found = hangs.look(now)
    if found == "stacks":
        contact.tell("stacks")
    if not isinstance(found, Hang):
        return False
    say(f"{found.text}: ending all")
    tally.note_hang(found, time.time())
    try:
        write_atomic(tally.run.path / STACKS, stacks_text(found, tally.hosts))
    except OSError as error:
        say(f"warning: {STACKS} cannot be written: {error}")
    contact.tell("fail")
    return True


def _what_failed(event: Event) -> str:
    if event["event"] == LOST:
        return f"{event['host']} is lost ({event['reason']})"
    if event["event"] == "launcher_exit":
        return f"what started the ranks on {event['host']} has failed"
    return f"a rank on {event['host']} has failed"


class _Samples:
    """Keeps what monitors see: every look in monitor.jsonl, the last of each host for the display."""

    def __init__(self, run: RunDir, progress: Progress, say: Callable[[str], None]) -> None:
        self._run, self._progress, self._say = run, progress, say
        self._told = False

    def take(self, event: Event) -> None:
        """Take in one event of an agent; all but a monitor's are passed over."""
        host = event["host"]
        if event["event"] == "note":
            self._say(f"{host}: {event['text']}")
        if event["event"] == "monitor_lost":
            self._say(f"warning: {host} is no longer monitored: {event['why']}")
        if event["event"] != "monitor":
            return
        line = {"time": event["time"], "host": host, **event["sample"]}
        self._progress.take_sample(host, line)
        try:
            append_json(self._run.monitor, line)
        except OSError as error:  # a full disk must not end supervision
            if not self._told:
                self._say(f"warning: {short_path(self._run.monitor)} cannot be written: {error}")
            self._told = True


class _Asked:
    """Passes requests to stop on to the hosts, once each."""

    def __init__(self, contact: Contact, stop: StopSignals, grace_s: float, say: Callable[[str], None]) -> None:
        self._contact, self._stop, self._grace_s, self._say = contact, stop, grace_s, say
        self._passed = 0

    def pass_on(self) -> None:
        if self._stop.count >= 1 and self._passed == 0:
            once_more = f"finishing the step and saving, at most {self._grace_s:.0f} s; once more ends at once"
            self._say(f"{self._stop.why}: {once_more}")
            self._contact.tell("stop")
            self._passed = 1
        if self._stop.count >= 2 and self._passed == 1:
            self._say("ending at once")
            self._contact.tell("kill")
            self._passed = 2


def _wait(events: queue.Queue[Event]) -> list[Event]:
    """What arrives within a tick."""
    found: list[Event] = []
    try:
        found.append(events.get(timeout=TICK_S))
        while True:
            found.append(events.get_nowait())
    except queue.Empty:
        return found
