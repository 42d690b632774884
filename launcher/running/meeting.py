"""The leader's side of a run whose launchers are started on every node by something else: here they find each other.

The launcher of node rank 0 listens; each other one (`launcher.running.follower`) connects, is compared with it, and
then is a host like any other, through its `NodeChannel`.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from launcher.errors import ConfigError, ExitCode, LauncherError, MachineError, Problem
from launcher.running import hello
from launcher.running.hello import Hello, Message
from launcher.running.nodechannel import NodeChannel
from launcher.running.reception import LOOK_S, Reception
from launcher.running.transport import Event
from launcher.running.venue import Venue
from launcher.spec import RunPlan

MEET_S = 600.0  # for all nodes to report
TELL_S = 10.0  # between two words about who is missing
TITLE = "with the nodes of this run"
LINGER_S = 3.0  # after a refusal, so that nodes which come a moment later hear of it

T = TypeVar("T")


class Meeting:
    """Takes followers in while it is entered, in a thread of its own."""

    def __init__(
        self,
        plan: RunPlan,
        venue: Venue,
        *,
        say: Callable[[str], None],
        ask: Callable[[str, int, int], None],  # host, signal, how often it came there: somebody wants the run to stop
        token: str = "",
    ) -> None:
        self.plan = plan  # as it was settled last
        self._venue, self._say, self._ask = venue, say, ask
        me = Hello(
            version=plan.version,
            node_rank=0,
            nodes=len(plan.hosts),
            machine=venue.machine,
            process=secrets.token_hex(8),
            common=hello.common(plan),
        )
        self._reception = Reception(me, token, plan.config.cluster.lost_contact_s, say, self._hear)
        self._ended = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meeting", daemon=True)

    def __enter__(self) -> Meeting:
        self._thread.start()
        self._server = self._wait_for(asyncio.start_server(self._reception.meet, sock=self._venue.socket))
        self._watch = asyncio.run_coroutine_threadsafe(self._reception.watch(), self._loop)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Without an `end` before, the followers are told that it went wrong here."""
        if isinstance(error, LauncherError):
            self.end(error.exit_code, error.render())
        self.end(ExitCode.INTERNAL, "node rank 0 has ended without a verdict")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def gather(self, give_up: Callable[[], bool] = lambda: False, patience_s: float = MEET_S) -> bool:
        """Wait until every node has reported; False when `give_up` said so first.

        Raises ConfigError when launchers do not fit together, MachineError that names those which never came.
        """
        started = told = time.monotonic()
        while (missing := self._missing()) and not self._reception.problems:
            if give_up():
                return False
            waited = time.monotonic() - started
            if waited > patience_s:
                raise self._never(missing, waited)
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                self._say(f"waiting for {', '.join(missing)} ({waited:.0f} s)")
            time.sleep(LOOK_S)
        deadline = time.monotonic() + LINGER_S
        while self._reception.problems and self._missing() and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._reception.full = True
        if self._reception.problems:
            raise ConfigError(*dict.fromkeys(self._reception.problems), title=TITLE)
        return True

    def open_channels(self, inbox: queue.Queue[Event]) -> dict[str, NodeChannel]:
        """The channel of each follower, by host; after `gather`."""
        for rank, node in sorted(self._reception.nodes.items()):
            node.channel = NodeChannel(self.plan.hosts[rank].name, inbox, self._sayer(rank))
        return {node.channel.host: node.channel for node in self._reception.nodes.values() if node.channel}

    @property
    def address(self) -> str:
        """Of this machine, as the other nodes reach it."""
        first = next(iter(self._reception.nodes.values()), None)
        return first.address if self._venue.everywhere and first is not None else self.plan.master_addr

    def settle(self, plan: RunPlan) -> None:
        """Tell the followers what they cannot know of the finished plan; before each start of the agents."""
        self.plan = plan
        names = ("run_id", "run_dir", "created_at", "master_addr", "master_port", "resume_from")
        same = {name: getattr(plan, name) for name in names}
        for rank in self._reception.nodes:
            host = plan.hosts[rank].name
            own = {"host_env": plan.host_env.get(host, {}), "cores": plan.cores.get(host, ())}
            self._sayer(rank)({"plan": {**same, **own}})

    def end(self, exit_code: int, text: str) -> None:
        """Tell the followers how the run ended, once; nobody is taken in any more."""
        if not self._ended:
            self._ended = True
            self._loop.call_soon_threadsafe(self._server.close)  # a next job of a sweep must not be taken for this one
            self._loop.call_soon_threadsafe(self._watch.cancel)
            self._wait_for(self._reception.part({"end": {"exit_code": int(exit_code), "text": text}}))

    def _hear(self, rank: int, message: Message) -> None:
        channel, ask = self._reception.nodes[rank].channel, message.get("ask")
        if channel is not None and "event" in message:
            channel.take(message["event"])
        if isinstance(ask, dict) and type(ask.get("signal")) is int and type(ask.get("times")) is int:
            self._ask(self.plan.hosts[rank].name, ask["signal"], ask["times"])

    def _missing(self) -> list[str]:
        here = {rank for rank, node in list(self._reception.nodes.items()) if node.session.connected}
        return [
            f"node rank {rank} ({host.name})" for rank, host in enumerate(self.plan.hosts) if rank and rank not in here
        ]

    def _never(self, missing: list[str], waited_s: float) -> MachineError:
        where = f"{self.plan.master_addr}:{self._venue.port}"
        tries = (
            "start the same command there, with its own NODE_RANK",
            f"look there at what it prints, and whether {where} is reached from there (a firewall, another network)",
        )
        problems = [
            Problem(f"{name} never reported at {where} within {waited_s:.0f} s", tries=tries) for name in missing
        ]
        return MachineError(*problems, title=TITLE)

    def _sayer(self, rank: int) -> Callable[[Message], None]:
        session = self._reception.nodes[rank].session

        def say(message: Message) -> None:
            self._loop.call_soon_threadsafe(lambda: session.say(message))

        return say

    def _wait_for(self, task: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result()
