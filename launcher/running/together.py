"""A run whose launchers are started on every node by somebody else: which part this one has, and where they meet."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import queue
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol, cast

from launcher.errors import ConfigError, Problem
from launcher.planning.joining import join_lines
from launcher.planning.nodes import NodeIdentity, need_identity
from launcher.rundir import RunDir, read_json
from launcher.running import hello
from launcher.running.follower import Signals, follow
from launcher.running.greeting import Refused, greet
from launcher.running.hello import Hello
from launcher.running.here import is_this_machine
from launcher.running.meeting import MEET_S, TITLE, Meeting
from launcher.running.ownhost import MakeOrder, node_order
from launcher.running.search import Search
from launcher.running.transport import Channel, Door, Event, close_all, python_argv
from launcher.running.venue import PORT, Venue, open_venue
from launcher.spec import RunPlan

ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation: nothing is sent to them


Work = Callable[[RunPlan, dict[str, Channel], queue.Queue[Event], Callable[[RunPlan], None]], int]


class Askable(Signals, Protocol):
    """A `launcher.running.supervise.StopSignals`."""

    def ask(self, number: int, times: int) -> None:
        """Somebody on another node has been sent this signal, so often by now."""


def is_together(plan: RunPlan) -> bool:
    """Whether this plan's launchers meet."""
    return plan.transport in ("env", "manual")


def run_together(plan: RunPlan, words: Sequence[str], stop: Askable, out: IO[str], work: Work) -> int:
    """Do this node's part of the run, to its end; the exit code, which is the same on every node.

    The node of rank 0 leads: `work` is what it does with the hosts, from the checks on. `words` are recorded ones.
    Raises ConfigError or MachineError where launchers do not find one another or do not fit together.
    """
    code = follow_leader(plan, stop, out)
    if code is not None:
        return code
    with lead(plan, words, stop, out) as meeting:
        if not meeting.gather(lambda: stop.count > 0):
            meeting.end(stop.exit_code, "stopped before all nodes had reported")
            return stop.exit_code
        inbox: queue.Queue[Event] = queue.Queue()
        channels = open_all(plan, meeting, inbox)
        try:
            code = work(dataclasses.replace(plan, master_addr=meeting.address), channels, inbox, meeting.settle)
        finally:
            close_all(list(channels.values()))
        meeting.end(code, last_word(meeting.plan, code))
        return code


def follow_leader(
    plan: RunPlan, stop: Signals, out: IO[str], *, make_order: MakeOrder = node_order, patience_s: float = MEET_S
) -> int | None:
    """Do the part of a node that follows, to its end; None on the node of rank 0, which leads.

    `patience_s` is for the leader to be found. Raises what `follow` raises.
    """
    if plan.transport != "env":
        return None
    identity = need_identity(os.environ)
    if identity.node_rank == 0:
        return None
    search = Search(identity.master_addr, identity.master_port or PORT, take_token(), patience_s)
    return follow(plan, identity.node_rank, search, stop, out, make_order)


@contextlib.contextmanager
def lead(plan: RunPlan, words: Sequence[str], stop: Askable, out: IO[str]) -> Iterator[Meeting]:
    """Open the meeting of this run, on the node of rank 0; the caller has it `gather`, and says how it ended."""

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    token = take_token()
    identity = need_identity(os.environ) if plan.transport == "env" else _by_hand(plan)
    venue = _open(plan, identity, token, lambda: stop.count > 0)
    others = len(plan.hosts) - 1
    say(f"nodes   {others} more {'is' if others == 1 else 'are'} awaited at {identity.master_addr}:{venue.port}")
    if plan.transport == "manual":
        for text in _typed(plan, words, identity.master_addr, venue.port):
            say(text)
    with Meeting(plan, venue, say=say, ask=lambda _, number, times: stop.ask(number, times), token=token) as meeting:
        yield meeting


def open_all(plan: RunPlan, meeting: Meeting, inbox: queue.Queue[Event]) -> dict[str, Channel]:
    """The channel to each host: this machine is the first, the others have reported."""
    first = plan.hosts[0].name
    own = Channel(Door(first, python_argv(plan.config.cluster), True), inbox)
    return {first: own, **cast(dict[str, Channel], meeting.open_channels(inbox))}


def last_word(plan: RunPlan, code: int) -> str:
    """How a run ended, in the few lines that its followers show."""
    run = RunDir(Path(plan.run_dir))
    try:
        outcome = read_json(run.outcome)
        failure = outcome["first_failure"]
        text = f"failed: {failure['text']}" if failure else outcome["status"]
    except (OSError, ValueError, LookupError, TypeError):  # it has not begun
        return f"node rank 0 has ended with exit code {code}; its own output says why"
    return f"{text}\n  run     {run.path}"


def take_token() -> str:
    """The secret of the nodes; it leaves the environment, so that no rank has it."""
    return os.environ.pop(hello.TOKEN, "")


def _open(plan: RunPlan, identity: NodeIdentity, token: str, give_up: Callable[[], bool]) -> Venue:
    port = identity.master_port if plan.transport == "manual" else identity.master_port or PORT
    try:
        return open_venue(identity.master_addr, port or 0, give_up)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    raise _taken(plan, identity.master_addr, port or 0, token)


def _taken(plan: RunPlan, address: str, port: int, token: str) -> ConfigError:
    """Who listens there already? A launcher is told of us, and is then as wrong as we are."""
    me = Hello(
        version=plan.version,
        node_rank=0,
        nodes=len(plan.hosts),
        machine=socket.gethostname(),
        process=secrets.token_hex(8),
        common=hello.common(plan),
    )
    try:
        asyncio.run(greet(address, port, me, token)).writer.close()
    except Refused as refused:
        return ConfigError(*refused.problems, title=TITLE)
    except (OSError, ValueError):
        pass
    text = f"MASTER_PORT={port} is taken on {address} by another program"
    return ConfigError(
        Problem(text, tries=(f"MASTER_PORT={port + 1 if port < 65535 else PORT} on every node",)), title=TITLE
    )


def _by_hand(plan: RunPlan) -> NodeIdentity:
    """This machine as the first of the nodes that a person starts; ConfigError when it is another."""
    first, given = plan.hosts[0], plan.config.cluster.master_addr
    named = plan.config.cluster.hostfile is not None or first.address is not None
    if named and not is_this_machine(first):
        text = f"cluster.transport=manual leads from the first host, and {first.name} is not this machine"
        tries = (f"start this on {first.name}", "this machine's line first in the hostfile", "cluster.transport=ssh")
        raise ConfigError(Problem(text, plan.hosts_source, tries))
    address = given or first.address or (first.name if named else _own_address())
    if address is None:
        text = "this machine has no address that other nodes could reach"
        raise ConfigError(Problem(text, tries=("cluster.master_addr=ADDRESS of this machine",)))
    return NodeIdentity(node_rank=0, num_nodes=len(plan.hosts), master_addr=address, master_port=None)


def _own_address() -> str | None:
    """By which packets to the outside leave."""
    for family, address in zip((socket.AF_INET, socket.AF_INET6), ELSEWHERE, strict=True):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asker:
            asker.connect((address, 9))
            return str(asker.getsockname()[0])
    return None


def _typed(plan: RunPlan, words: Sequence[str], address: str, port: int) -> Iterator[str]:
    python = plan.config.cluster.python or sys.executable
    lines, secret = join_lines(plan, words, address=address, port=port, cwd=os.getcwd(), python=python)
    for rank, line in enumerate(lines, start=1):
        yield f"type on {plan.hosts[rank].name}, node rank {rank}:"
        yield f"  {line}"
    for name in secret:
        yield f"{name} is a secret: set it yourself on each of them before, export {name}=..."
