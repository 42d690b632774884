"""Keeps the connections of a supervisor alive, and tells the hosts when it has died.

A process of its own, which Ctrl-Z and Ctrl-C do not reach: a supervisor that sleeps must not look as if it were gone,
and one that was killed cannot say so. Its standard input is a socket: `+HOST` with a descriptor, `-HOST`; its end means
that the supervisor has died. Standard library only, as it starts beside every run on other hosts.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

PING_S = 5.0  # at most, and several within cluster.lost_contact_s


class Guard:
    """The supervisor's side."""

    def __init__(self, lost_contact_s: float) -> None:
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -S: it needs no packages, and is there in 10 ms
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__)), str(min(PING_S, lost_contact_s / 4))],
            stdin=other.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        other.close()

    @property
    def over(self) -> bool:
        """Whether it was killed: hosts that hear nothing stop by themselves after cluster.lost_contact_s."""
        return self._process.poll() is not None

    def watch(self, host: str, descriptor: int) -> None:
        """Keep the connection alive whose input this is; messages to it must be shorter than a pipe's atom."""
        self._tell(f"+{host}", [descriptor])

    def forget(self, host: str) -> None:
        """Leave this one alone; returns when it is."""
        self._tell(f"-{host}", [])

    def close(self) -> None:
        """End it without a word to the hosts."""
        self._process.kill()
        self._process.wait()
        self._line.close()

    def _tell(self, text: str, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._line, [text.encode()], descriptors)
            self._line.recv(1)
        except OSError:  # killed
            pass


def main() -> None:
    """Ping the hosts until the supervisor is gone, then say so."""
    line, ping_s = socket.socket(fileno=0), float(sys.argv[1])
    hosts: dict[bytes, int] = {}
    while True:
        if not select.select([line], [], [], ping_s)[0]:
            for descriptor in hosts.values():
                _write(descriptor, b'{"do": "alive"}\n')
            continue
        text, descriptors, _, _ = socket.recv_fds(line, 4096, 1)
        if not text:
            break
        old = hosts.pop(text[1:], None)
        if old is not None:
            os.close(old)
        hosts.update({text[1:]: descriptor for descriptor in descriptors})
        line.send(b".")
    for descriptor in hosts.values():
        _write(descriptor, b'{"do": "gone"}\n')


def _write(descriptor: int, message: bytes) -> None:
    try:
        os.write(descriptor, message)
    except OSError:  # full, as nobody reads there, or ended
        pass


if __name__ == "__main__":
    main()
