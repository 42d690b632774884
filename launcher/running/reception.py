"""Takes in the followers of a run: compares each with the leader, keeps its connection, takes it back after a loss.

Everything here runs in one event loop. Strangers (a port scanner, another program, a launcher without the secret) are
sent away and change nothing; a launcher that does not fit is told why, and is a problem of the run until all are here.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from launcher.errors import Problem
from launcher.running import hello
from launcher.running.hello import Hello, Message
from launcher.running.nodechannel import NodeChannel
from launcher.running.session import Lines, Session, keep_alive

RETURN_S = 8.0  # for a follower to come back whose side has ended the connection: most likely it has died
PART_S = 5.0  # for the last message to arrive
STRANGERS = 64  # connections that have not said who they are, beyond which new ones are ended
LOOK_S = 0.2


@dataclass(slots=True)
class Node:
    """A follower that has reported."""

    hello: Hello
    session: Session
    address: str = ""  # of this machine, by which it came
    channel: NodeChannel | None = None
    lost_at: float | None = None
    patience_s: float = 0.0
    why: str = ""
    gone: bool = False  # it will not be taken back


class Reception:
    """The followers by node rank, and what is wrong with those that came."""

    def __init__(
        self, me: Hello, token: str, lost_contact_s: float, warn: Callable[[str], None], hear: Callable[..., None]
    ) -> None:
        self.nodes: dict[int, Node] = {}
        self.problems: list[Problem] = []
        self.full = False  # all are here, or have been
        self._me, self._token, self._lost_contact_s = me, token, lost_contact_s
        self._warn, self._hear = warn, hear  # hear(node rank, message)
        self._strangers = 0
        self._warned: set[str] = set()
        self._over = False

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection from its greeting to its end."""
        lines, node = Lines(reader), None
        self._strangers += 1
        try:
            if self._strangers <= STRANGERS:
                keep_alive(writer.get_extra_info("socket"))
                node = await asyncio.wait_for(self._greet(lines, writer), hello.GREETING_S)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            self._send_away(writer, str(error) or "it says nothing")
        finally:
            self._strangers -= 1
        if node is None:
            writer.close()
        else:
            await self._serve(node, lines, writer)

    async def watch(self) -> None:
        """Give up those that do not come back."""
        while True:
            await asyncio.sleep(LOOK_S)
            for node in self.nodes.values():
                late = node.lost_at is not None and time.monotonic() - node.lost_at > node.patience_s
                if late and node.channel is not None and not node.gone:
                    node.gone = True
                    node.channel.lose(node.why)

    async def part(self, message: Message) -> None:
        """Say a last word to all that are here."""
        self._over = True
        here = [node.session for node in self.nodes.values() if node.session.connected]
        for session in here:
            session.say(message)
        deadline = time.monotonic() + PART_S
        while time.monotonic() < deadline and any(s.connected and not s.idle for s in here):
            await asyncio.sleep(0.02)
        for session in here:
            session.disconnect()

    async def _greet(self, lines: Lines, writer: asyncio.StreamWriter) -> Node | None:
        """Learn who it is; None when it was told why it cannot take part. ValueError for a stranger."""
        nonce = secrets.token_hex(16)
        writer.write(hello.encode({"launcher": hello.PROTOCOL, "nonce": nonce, "token": bool(self._token)}))
        line = await lines.next()
        if line is None:
            raise ValueError("it has left without a word")
        said = hello.decode(line)
        theirs = hello.read_hello(said)
        problems = []
        if self._token and not hello.is_proven(self._token, "follower", nonce, said):
            self._send_away(writer, f"it does not know the {hello.TOKEN} of node rank 0")
            problems = [Problem(f"{hello.TOKEN} is not the one of node rank 0", tries=("the same one on every node",))]
        problems = problems or self._judge(theirs)
        if problems:
            writer.write(hello.encode({"refused": hello.problems_to_data(problems)}))
            await writer.drain()
            return None
        return self._take_in(theirs, str(said.get("nonce")), writer)

    def _judge(self, theirs: Hello) -> list[Problem]:
        """Why it cannot take part; until all are here, that is also a problem of the run."""
        known = self.nodes.get(theirs.node_rank)
        same = known is not None and known.hello.process == theirs.process
        if self._over or (theirs.run_id is not None and not same):
            return [Problem("node rank 0 is at work on another run")]
        if known is not None and same and known.gone:
            return [Problem("node rank 0 has gone on without this node")]
        if self.full and not same:
            text = f"the run of node rank 0 has begun, with another launcher as its node rank {theirs.node_rank}"
            return [Problem(text, tries=("start the command once on each node", "MASTER_PORT=ANOTHER for another run"))]
        problems = hello.differences(self._me, theirs)
        if not problems and known is not None and not same and known.session.connected:
            problems = [hello.same_rank(known.hello, theirs)]
        self.problems += problems
        return problems

    def _take_in(self, theirs: Hello, nonce: str, writer: asyncio.StreamWriter) -> Node:
        node = self.nodes.get(theirs.node_rank)
        if node is None or node.hello.process != theirs.process:
            take = functools.partial(self._hear, theirs.node_rank)
            node = self.nodes[theirs.node_rank] = Node(hello=theirs, session=Session(take))
        node.address = str(writer.get_extra_info("sockname")[0])
        welcome: Message = {"welcome": True, "heard": node.session.heard}
        if self._token:
            welcome["proof"] = hello.prove(self._token, "leader", nonce, welcome)
        writer.write(hello.encode(welcome))
        node.session.connect(writer, theirs.heard)
        if node.lost_at is not None and node.channel is not None:
            node.channel.note(f"contact with {node.channel.host} is back after {time.monotonic() - node.lost_at:.0f} s")
        node.lost_at = None
        return node

    async def _serve(self, node: Node, lines: Lines, writer: asyncio.StreamWriter) -> None:
        why, patience_s = "its side has ended the connection", RETURN_S
        try:
            await node.session.listen(lines)
        except ConnectionError:
            pass
        except OSError as error:  # that is the network's: the follower may be well
            why, patience_s = error.strerror or str(error), self._lost_contact_s
        except ValueError as error:
            why = f"it has sent {error}"
        if not node.session.uses(writer):
            writer.close()  # it has come back over another connection already
            return
        node.session.disconnect()
        node.lost_at, node.why, node.patience_s = time.monotonic(), why, min(patience_s, self._lost_contact_s)
        if node.channel is not None and not self._over:
            text = f"contact with {node.channel.host} is lost ({why}): waiting {node.patience_s:.0f} s for its return"
            node.channel.note(text)

    def _send_away(self, writer: asyncio.StreamWriter, why: str) -> None:
        address = str((writer.get_extra_info("peername") or ["?"])[0])
        if not self.full and address not in self._warned and len(self._warned) < STRANGERS:
            self._warned.add(address)
            self._warn(f"a connection from {address} is none of a node of this run: {hello.shown(why)}")
