"""Linux namespaces from Python: children in other process namespaces, and who lives in a network namespace."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

NEW_PIDS = 0x20000000  # linux/sched.h

libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def in_new_pids() -> Iterator[None]:
    """The next child of this thread is process 1 of a new process namespace; its pid here is this machine's."""
    try:
        _check(libc.unshare(NEW_PIDS))
        yield
    finally:
        _set_pids(os.getpid())


@contextmanager
def in_pids_of(pid: int) -> Iterator[None]:
    """Children of this thread live in the process namespace of `pid`; their pids here are this machine's."""
    try:
        _set_pids(pid)
        yield
    finally:
        _set_pids(os.getpid())


def pids_in(network: str) -> list[int]:
    """The processes of a network namespace, called as /proc/PID/ns/net reads; zombies are not among them."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _network(pid) == network]


def kill(pid: int) -> None:
    """End a process at once, if there still is one."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _network(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # ended, or not ours to look at
        return ""


def _set_pids(pid: int) -> None:
    with open(f"/proc/{pid}/ns/pid", "rb") as space:
        _check(libc.setns(space.fileno(), NEW_PIDS))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
