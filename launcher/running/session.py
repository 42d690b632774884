"""Messages between two launchers over a connection that may be lost and made anew: each arrives once and in order.

Lines are JSON objects: {"number", "say"} carries a message, {"heard"} says how many have arrived. What was not
acknowledged is kept, and sent again over the next connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from launcher.running.hello import HELLO_BYTES, Message, decode, encode

LINE_BYTES = 4 * 2**20  # the longest message; a piece of a log has 64 KiB
BACKLOG = 2**20  # bytes not acknowledged, beyond which what can be spared is left out
DEAD_S = 20  # a connection over which nothing passes for so long is lost


class Session:
    """One side of it; not for several threads."""

    def __init__(self, take: Callable[[Message], None]) -> None:
        self.heard = 0  # messages of the other side that were taken
        self._take = take
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._writer: asyncio.StreamWriter | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._writer is not None

    @property
    def idle(self) -> bool:
        """Whether all that was said has arrived."""
        return not self._kept

    def say(self, message: Message, *, spare: bool = False) -> None:
        """Send a message, now or when there is a connection; one to `spare` is left out when many wait."""
        if spare and self._kept_bytes > BACKLOG:
            return
        self._number += 1
        line = encode({"number": self._number, "say": message})
        self._kept.append((self._number, line))
        self._kept_bytes += len(line)
        if self._writer is not None:
            self._writer.write(line)

    def connect(self, writer: asyncio.StreamWriter, heard: int) -> None:
        """Go on over a new connection, to a side that has had `heard` messages."""
        self.disconnect()
        self._writer = writer
        self._forget(heard)
        for _, line in self._kept:
            writer.write(line)

    def uses(self, writer: asyncio.StreamWriter) -> bool:
        """Whether this is the connection now."""
        return self._writer is writer

    def disconnect(self) -> None:
        """End the connection, if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def listen(self, lines: Lines) -> None:
        """Take in what comes over a connection until it ends. Raises OSError or ValueError when it is broken."""
        while (line := await lines.next(LINE_BYTES)) is not None:
            message = decode(line)
            heard, number = message.get("heard"), message.get("number")
            if isinstance(heard, int):
                self._forget(heard)
            if isinstance(number, int) and isinstance(message.get("say"), dict):
                if number > self.heard + 1:
                    raise ValueError(f"message {number} after {self.heard}")
                if self._writer is not None:
                    self._writer.write(encode({"heard": number}))
                if number == self.heard + 1:
                    self.heard = number
                    self._take(message["say"])

    def _forget(self, heard: int) -> None:
        while self._kept and self._kept[0][0] <= heard:
            self._kept_bytes -= len(self._kept.popleft()[1])


class Lines:
    """Lines of a connection, none longer than is allowed."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._unread = bytearray()

    async def next(self, limit: int = HELLO_BYTES) -> bytes | None:
        """The next line without its end, None at the end. ValueError for one that is too long."""
        seen = 0
        while (end := self._unread.find(b"\n", seen)) < 0:
            if len(self._unread) > limit:
                raise ValueError(f"a line of more than {limit} bytes")
            seen = len(self._unread)
            data = await self._reader.read(65536)
            if not data:
                return None
            self._unread += data
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within `DEAD_S` that the other machine is gone; a process that sleeps is not."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_S // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_S // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
