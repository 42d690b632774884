"""The follower's side of the greeting of `launcher.running.hello`."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict, dataclass

from launcher.errors import Problem
from launcher.running import hello
from launcher.running.hello import Hello, Message
from launcher.running.session import Lines, keep_alive


class Refused(Exception):
    """The leader does not take part in a run with us."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Greeted:
    """A connection to the leader."""

    lines: Lines
    writer: asyncio.StreamWriter
    heard: int  # messages of ours that the leader has had
    address: str  # of the leader, as it was reached


async def greet(address: str, port: int, me: Hello, token: str) -> Greeted:
    """Connect to the leader and be taken in. Raises Refused, or OSError or ValueError when no leader is there."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), hello.GREETING_S)
    except asyncio.TimeoutError:
        raise TimeoutError("no answer") from None
    try:
        lines = Lines(reader)
        keep_alive(writer.get_extra_info("socket"))
        heard = await asyncio.wait_for(_introduce(lines, writer, me, token), 2 * hello.GREETING_S)
        return Greeted(lines, writer, heard, str(writer.get_extra_info("peername")[0]))
    except asyncio.TimeoutError:
        writer.close()
        raise ValueError("what listens there does not answer") from None
    except (OSError, ValueError, Refused):
        writer.close()
        raise


async def _introduce(lines: Lines, writer: asyncio.StreamWriter, me: Hello, token: str) -> int:
    first = await _next(lines)
    if "launcher" not in first:
        raise ValueError("what listens there is no launcher")
    if first["launcher"] != hello.PROTOCOL:
        raise Refused((Problem("node rank 0 runs another version of the launcher", tries=(hello.SAME,)),))
    if bool(token) != first.get("token"):
        where = "here, and is not on node rank 0" if token else "on node rank 0, and is not here"
        raise Refused((Problem(f"{hello.TOKEN} is set {where}", tries=(f"the same {hello.TOKEN} on every node",)),))
    nonce = secrets.token_hex(16)
    said: Message = {**asdict(me), "nonce": nonce}
    if token:
        said["proof"] = hello.prove(token, "follower", str(first.get("nonce")), said)
    writer.write(hello.encode(said))
    answer = await _next(lines)
    if "refused" in answer:
        raise Refused(hello.problems_from_data(answer["refused"]))
    if token and not hello.is_proven(token, "leader", nonce, answer):
        raise Refused((Problem(f"what answers as node rank 0 does not know {hello.TOKEN}"),))
    if answer.get("welcome") is not True or type(answer.get("heard")) is not int:
        raise ValueError("what listens there is no launcher")
    return int(answer["heard"])


async def _next(lines: Lines) -> Message:
    line = await lines.next()
    if line is None:
        raise ConnectionResetError("the connection was ended")
    return hello.decode(line)
