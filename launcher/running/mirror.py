"""Keeps what hosts without this run folder write to their own: logs, metrics, events, the states of their ranks."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path

from launcher.rundir import RunDir, write_json
from launcher.running.journal import short_path
from launcher.running.transport import Event

# What a host may write here. Its names are checked, as a host is trusted with ranks, not with this machine's files.
_NAMES = re.compile(r"logs/[A-Za-z0-9_.:-]+\.log|metrics\.jsonl|events\.jsonl")


class Mirror:
    """Takes the events `file` and `rank` of hosts."""

    def __init__(self, run: RunDir, say: Callable[[str], None]) -> None:
        self.have: dict[str, dict[str, int]] = {}  # host -> bytes of each of its files that have arrived
        self._run, self._say = run, say
        self._unshared: set[str] = set()
        self._failed = False

    def take(self, event: Event) -> None:
        """Keep what an event brings; never raises, since a full disk here must not end a run elsewhere."""
        try:
            if event["event"] == "started" and not event["shared"]:
                self._unshared.add(event["host"])
            elif event["event"] == "file":
                self._append(event)
            elif event["event"] == "rank" and event["host"] in self._unshared:
                write_json(self._run.rank(int(event["rank"])), event["status"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not self._failed:
                self._failed = True
                self._say(f"warning: {short_path(self._run.path)} lacks what {event['host']} writes: {error}")

    def _append(self, event: Event) -> None:
        name, at = event["path"], int(event["at"])
        if not _NAMES.fullmatch(name):
            raise ValueError(f"{name!r} is no file that a host may write")
        arrived = self.have.setdefault(event["host"], {})
        if at != arrived.get(name, 0):
            return  # sent twice, around a lost connection
        data = base64.b64decode(event["data"])
        path = Path(self._run.path, name)
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
        arrived[name] = at + len(data)
