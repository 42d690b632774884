"""The launcher of a node that another one leads: it finds the leader, and runs this node's part of the run for it.

No code, command or environment comes over the network. The leader says names of programs, which are run from this
node's own copy, and messages to them (`launcher.running.ownhost`); the order to the agent is made here, from this
node's own command line, with the few values of `launcher.planning.joining.settled` that only the leader can know.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import time
from dataclasses import replace
from typing import IO, Protocol

from launcher.errors import ExitCode, LauncherError, MachineError, Problem
from launcher.planning.joining import settled
from launcher.running import hello
from launcher.running.hello import Hello, Message
from launcher.running.meeting import TITLE
from launcher.running.ownhost import MakeOrder, OwnHost
from launcher.running.search import Search, reason_of
from launcher.running.session import Session
from launcher.running.transport import LOST, Event
from launcher.spec import RunPlan

TICK_S = 0.05
END_S = 30.0  # for an agent to end its ranks once nobody waits for it
OBEY_S = 5.0  # for the leader to end the run at once
SHOWN_LETTERS = 64 * 1024  # of the leader's last word


class Signals(Protocol):
    """What is needed of `launcher.running.supervise.StopSignals`."""

    @property
    def count(self) -> int:
        """How many have come."""

    @property
    def first(self) -> signal.Signals | None:
        """The first that came."""

    @property
    def exit_code(self) -> int:
        """After the stop that was asked for."""


def follow(plan: RunPlan, node_rank: int, search: Search, stop: Signals, out: IO[str], make_order: MakeOrder) -> int:
    """Take part as node `node_rank` in the run of the leader that is searched for; its exit code, once it is over.

    Raises ConfigError when the launchers do not fit together, MachineError when no leader is found.
    """
    return asyncio.run(_Follower(plan, node_rank, search, stop, out, make_order).work())


class _Follower:
    def __init__(
        self,
        plan: RunPlan,
        node_rank: int,
        search: Search,
        stop: Signals,
        out: IO[str],
        make_order: MakeOrder,
    ) -> None:
        self._plan, self._search, self._stop, self._out = plan, search, stop, out
        self._own = OwnHost(plan, node_rank, self._pass_on, make_order)
        self._session = Session(self._hear)
        self._me = Hello(
            version=plan.version,
            node_rank=node_rank,
            nodes=len(plan.hosts),
            machine=socket.gethostname(),
            process=secrets.token_hex(8),
            common=hello.common(plan),
        )
        self._met = False
        self._asked = 0  # signals that were acted on
        self._code: int | None = None  # to leave with
        self._leave_at = 0.0  # at the latest
        self._kill_at: float | None = None
        self._error: LauncherError | None = None

    async def work(self) -> int:
        """Until the run is over."""
        contact = asyncio.create_task(self._keep_contact())
        try:
            while self._code is None or (self._own.busy and time.monotonic() < self._leave_at):
                await asyncio.sleep(TICK_S)
                if contact.done() and self._code is None:
                    self._be_alone(contact.result())
                self._own.poll()
                self._mind_signals()
        finally:
            contact.cancel()
            self._own.leave()
            self._session.disconnect()
        if self._error is not None:
            raise self._error
        return self._code

    async def _keep_contact(self) -> str:
        """Find the leader, listen to it, find it again; at last, why it is gone."""
        greeted = await self._search.first(self._me, self._say)
        self._met = True
        where = f"{self._search.address}:{self._search.port}"
        self._say(f"node rank {self._me.node_rank} of {self._me.nodes}: follows node rank 0 at {where}")
        patience_s = self._plan.config.cluster.lost_contact_s
        while True:
            self._session.connect(greeted.writer, greeted.heard)
            why = "its side has ended the connection"
            try:
                await self._session.listen(greeted.lines)
            except (OSError, ValueError) as error:
                why = reason_of(error)
            self._session.disconnect()
            if self._code is not None:
                return why
            lost_at = time.monotonic()
            self._say(f"contact with node rank 0 is lost ({why}): trying again for {patience_s:.0f} s")
            found = await self._search.again(replace(self._me, heard=self._session.heard), patience_s)
            if isinstance(found, str):
                return found
            greeted = found
            self._say(f"contact with node rank 0 is back after {time.monotonic() - lost_at:.0f} s")

    def _hear(self, message: Message) -> None:
        """Do what the leader says."""
        try:
            if "plan" in message:
                self._own.plan = settled(self._plan, message["plan"], self._me.node_rank)
                self._me = replace(self._me, run_id=self._own.plan.run_id)
            elif "start" in message:
                self._own.start(message["start"])
            elif "order" in message:
                self._say_what_starts()
                self._own.order()
            elif "tell" in message:
                self._own.tell(message["tell"])
            elif "close" in message:
                self._own.close()
            elif "kill" in message:
                self._own.kill()
            elif "end" in message:
                self._take_verdict(message["end"])
        except LauncherError as error:
            self._refuse(error)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            text = f"node rank 0 has sent what it may not: {hello.shown(error)}"
            tries = (hello.SAME, f"{hello.TOKEN}=SECRET on every node   (keeps strangers out)")
            self._refuse(MachineError(Problem(text, tries=tries), title=TITLE))

    def _refuse(self, error: LauncherError) -> None:
        """Take no further part; the leader is told why."""
        self._error = error
        reason = "; ".join(problem.text for problem in error.problems)
        self._pass_on({"event": LOST, "time": time.time(), "exit_code": int(error.exit_code), "reason": reason})
        self._leave(error.exit_code, "kill")

    def _take_verdict(self, end: Message) -> None:
        code = end["exit_code"]
        text = hello.shown(end["text"], SHOWN_LETTERS).rstrip()
        if text:
            self._say(text)
        self._leave(code if type(code) is int and 0 <= code < 256 else ExitCode.INTERNAL, "kill")

    def _be_alone(self, why: str) -> None:
        """The leader is gone: end this node's part."""
        self._say(f"node rank 0 is gone ({why}): ending this node's part of the run")
        self._leave(ExitCode.RETRY, "gone", self._plan.config.cluster.stop_grace_s + END_S)

    def _leave(self, code: int, do: str, patience_s: float = END_S) -> None:
        """Leave with this code once the agent is done, whom we tell so."""
        self._code, self._leave_at = int(code if self._code is None else self._code), time.monotonic() + patience_s
        self._own.tell_agent(do)

    def _mind_signals(self) -> None:
        """The first asks the leader to stop the run, the second ends this node's part; both as Ctrl-C there would."""
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._kill_at = None
            self._leave(self._stop.exit_code, "kill")
        if self._stop.count <= self._asked or self._stop.first is None:
            return
        self._asked, name = self._stop.count, self._stop.first.name
        if not self._met:
            self._leave(self._stop.exit_code, "kill")
        elif self._asked == 1:
            self._say(f"{name}: node rank 0 is asked to stop the run; once more ends it at once")
        else:  # the leader ends all at once; should it not, this node's part ends without it
            self._kill_at = time.monotonic() + (OBEY_S if self._session.connected and self._code is None else 0)
        self._session.say({"ask": {"signal": int(self._stop.first), "times": self._asked}})

    def _say_what_starts(self) -> None:
        first = sum(host.slots for host in self._plan.hosts[: self._me.node_rank])
        last = first + self._plan.hosts[self._me.node_rank].slots - 1
        ranks = f"rank {first} is" if first == last else f"ranks {first} to {last} are"
        self._say(f"run     {self._own.plan.run_dir}: {ranks} started here, progress is shown on node rank 0")

    def _pass_on(self, event: Event) -> None:
        self._session.say({"event": event}, spare=event["event"] == "monitor")

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)
