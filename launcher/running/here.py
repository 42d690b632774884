"""Which host is this machine."""

from __future__ import annotations

import socket

from launcher.planning import pool
from launcher.spec import Host


def is_this_machine(host: Host) -> bool:
    """Whether the host is this machine: by its name, or because only a machine's own addresses can be bound."""
    return pool.is_this_machine(host, socket.gethostname()) or bind_error(host.address or host.name, 0) is None


def bind_error(address: str, port: int) -> OSError | None:
    """Why nothing can listen at this address and port of this machine; None when it can. Port 0: at any."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the ranks' own store does
            probe.bind(where)
    except OSError as error:
        return error
    return None
