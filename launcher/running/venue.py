"""Where the launchers of a run meet: an address and a port of the machine of node rank 0."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from launcher.errors import ConfigError, MachineError, Problem

PORT = 29500  # where MASTER_PORT is not set; torchrun's
RESOLVE_S = 60.0  # for the own name to become known, which takes some seconds in Kubernetes


@dataclass(frozen=True, slots=True)
class Venue:
    """A socket that listens."""

    socket: socket.socket
    machine: str
    everywhere: bool  # the address meant "this machine": any address of it will do

    @property
    def port(self) -> int:
        """At which it listens."""
        return int(self.socket.getsockname()[1])


def open_venue(address: str, port: int, give_up: Callable[[], bool] = lambda: False) -> Venue:
    """Listen there, and nowhere else; port 0 takes a free one.

    A name that means "this machine" on every machine (localhost, or the own name where /etc/hosts says 127.0.1.1) is
    of no use to the others: then it listens at every address. Raises ConfigError or MachineError; OSError EADDRINUSE
    when somebody else listens there.
    """
    family, where = _resolve(address, port, give_up)
    everywhere = not _is_number(address) and ipaddress.ip_address(where[0]).is_loopback
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port) if everywhere else where)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise
        raise _cannot(address, port, error) from None
    return Venue(listener, socket.gethostname(), everywhere)


def _resolve(address: str, port: int, give_up: Callable[[], bool]) -> tuple[socket.AddressFamily, tuple[str, int]]:
    deadline = time.monotonic() + RESOLVE_S
    while True:
        try:
            family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            return family, (str(where[0]), int(where[1]))
        except OSError as error:
            if time.monotonic() > deadline or give_up() or _is_number(address):
                text = f"MASTER_ADDR={address} is not known on this machine, node rank 0: {error.strerror or error}"
                raise MachineError(
                    Problem(text, tries=("MASTER_ADDR=ADDRESS of this machine, on every node",))
                ) from None
            time.sleep(1.0)


def _cannot(address: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRNOTAVAIL:
        text = f"MASTER_ADDR={address} is no address of this machine, which says that it is node rank 0"
        tries = (
            "NODE_RANK=1, 2, ... on the other nodes, each its own",
            "MASTER_ADDR=ADDRESS of this machine, on every node",
            "clusterIP: None   (in the Kubernetes service of node rank 0, so that its name means the pod)",
        )
        return ConfigError(Problem(text, tries=tries))
    text = f"MASTER_ADDR={address} MASTER_PORT={port} cannot be used: {os.strerror(error.errno or 0)}"
    return ConfigError(Problem(text, tries=("MASTER_PORT=29500 on every node",)))


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
