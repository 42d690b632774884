"""A follower looks for the launcher of node rank 0, and looks for it again when contact was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from launcher.errors import ConfigError, MachineError, Problem
from launcher.running.greeting import Greeted, Refused, greet
from launcher.running.hello import Hello, shown
from launcher.running.meeting import MEET_S, TELL_S, TITLE

RETRY_S = 1.0
REFUSALS = 3  # of a connection by that machine, one after another: its launcher is gone


@dataclass(frozen=True, slots=True)
class Search:
    """Where the leader should be."""

    address: str
    port: int
    token: str = ""
    patience_s: float = MEET_S

    async def first(self, me: Hello, say: Callable[[str], None]) -> Greeted:
        """Be taken in. Raises ConfigError when the launchers do not fit together, MachineError when none is found."""
        started = told = time.monotonic()
        while True:
            try:
                return await greet(self.address, self.port, me, self.token)
            except Refused as refused:
                raise ConfigError(*refused.problems, title=TITLE) from None
            except (OSError, ValueError) as error:
                why = reason_of(error)
            now = time.monotonic()
            if now - started > self.patience_s:
                raise self._nobody(why)
            if now - told >= TELL_S:
                told = now
                say(f"waiting for node rank 0 at {self.address}:{self.port} ({now - started:.0f} s): {why}")
            await asyncio.sleep(RETRY_S)

    async def again(self, me: Hello, lost_contact_s: float) -> Greeted | str:
        """A new connection to the same leader, or why there will be none."""
        deadline, refusals, why = time.monotonic() + lost_contact_s, 0, ""
        while time.monotonic() < deadline:
            try:
                return await greet(self.address, self.port, me, self.token)
            except Refused as refused:
                return str(refused)
            except ConnectionRefusedError:
                refusals += 1
                if refusals == REFUSALS:
                    return "its launcher has ended without a word"
            except (OSError, ValueError) as error:
                refusals, why = 0, reason_of(error)
            await asyncio.sleep(RETRY_S / 2 if refusals else RETRY_S)
        return f"no contact for {lost_contact_s:.0f} s: {why}"

    def _nobody(self, why: str) -> MachineError:
        text = f"no launcher was found at {self.address}:{self.port}, where node rank 0 should be, "
        text += f"within {self.patience_s:.0f} s: {why}"
        tries = ("start the same command on node rank 0", "MASTER_ADDR=ADDRESS MASTER_PORT=PORT of node rank 0")
        return MachineError(Problem(text, tries=tries), title=TITLE)


def reason_of(error: Exception) -> str:
    """In few words; asyncio repeats the address in its own."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    return shown((isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__)
