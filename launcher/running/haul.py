"""Moves files from one host to another: the launching side of `carry`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from launcher.running.crew import TICK_S, GiveUp, Stopped, never
from launcher.running.meter import Meter
from launcher.running.transport import Door, Event, open_raw

CHUNK = 2**20
END_S = 5.0  # for a program to end after its last word

Files = dict[str, list[Any]]  # relative path -> [bytes, SHA-256 or empty]


class NotMoved(Exception):
    """Why files did not arrive, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Files that go from one host to another."""

    source: Door
    target: Door
    root: str  # at the source
    paths: Sequence[str]  # below it
    to: str  # at the target: the folder that stands for `root`
    size: int  # bytes, about: for the progress and the room on the disk
    whole: bool = False  # the folder appears whole or not at all
    follow: bool = True  # links are sent as what they point to
    label: str = ""  # for the progress


def move(loads: Sequence[Load], out: IO[str], *, give_up: GiveUp = never) -> dict[str, str]:
    """Move all loads at the same time and show how far they are; label -> why that load did not arrive.

    Raises Stopped once `give_up` says so; then no half of a file is left.
    """
    meter = Meter(out, {load.label: load.size for load in loads})
    failed: dict[str, str] = {}
    stopped = threading.Event()

    def work(load: Load) -> None:
        try:
            _move(load, lambda size: meter.add(load.label, size), stopped.is_set)
        except NotMoved as error:
            failed[load.label] = str(error)

    threads = [threading.Thread(target=work, args=(load,), daemon=True) for load in loads]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                if give_up():
                    raise Stopped
                meter.show()
                thread.join(TICK_S)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
        meter.close()
    return failed


def _move(load: Load, moved: Callable[[int], None], stopped: GiveUp) -> None:
    source, target = open_raw(load.source, "carry"), open_raw(load.target, "carry")
    watch = threading.Thread(target=_kill_when, args=(stopped, source, target), daemon=True)
    watch.start()
    try:
        order = {"do": "unpack", "root": load.to, "bytes": load.size, "whole": load.whole}
        _answer(target, order, load.target.host)
        paths = list(load.paths)
        _answer(source, {"do": "pack", "root": load.root, "paths": paths, "follow": load.follow}, load.source.host)
        if _copy(source, target, moved) and source.wait(END_S) != 0:
            raise NotMoved(f"{load.source.host}: {_last_words(source)}")
        _answer(target, None, load.target.host)
    except subprocess.TimeoutExpired:
        raise NotMoved(f"{load.source.host} does not end") from None
    finally:
        source.kill()
        close_quietly(target.stdin)  # so that it can take away what is not whole
        _wait_or_kill(target)
        source.wait()
        watch.join()
        for pipe in (source.stdin, source.stdout, source.stderr, target.stdout, target.stderr):
            close_quietly(pipe)


def _copy(source: subprocess.Popen[bytes], target: subprocess.Popen[bytes], moved: Callable[[int], None]) -> bool:
    """Pass all output of one on to the other; False when that one does not take it."""
    assert source.stdout is not None and target.stdin is not None
    try:
        while size := os.splice(source.stdout.fileno(), target.stdin.fileno(), CHUNK):
            moved(size)
        target.stdin.close()
    except OSError:
        return False
    return True


def _kill_when(stopped: GiveUp, source: subprocess.Popen[bytes], target: subprocess.Popen[bytes]) -> None:
    """End what waits for a host that may hang."""
    while source.poll() is None or target.poll() is None:
        if stopped():
            source.kill()
            _wait_or_kill(target)
        time.sleep(TICK_S)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answer(process: subprocess.Popen[bytes], order: Event | None, host: str) -> Event:
    """Send an order and read its answer; lines before it are a login script's."""
    assert process.stdin is not None and process.stdout is not None
    if order is not None:
        data = json.dumps(order).encode() + b"\n"
        try:
            process.stdin.write(json.dumps({"bytes": len(data)}).encode() + b"\n" + data)
            process.stdin.flush()
        except BrokenPipeError:
            pass
    line = b""
    while byte := os.read(process.stdout.fileno(), 1):
        line += byte
        if byte != b"\n":
            continue
        event = _event(line)
        line = b""
        if event is not None and event["event"] == "refused":
            raise NotMoved(f"{host}: {event['text']}")
        if event is not None:
            return event
    raise NotMoved(f"{host}: {_last_words(process)}")


def close_quietly(pipe: IO[bytes] | None) -> None:
    """Close a pipe whose other end may be gone."""
    with contextlib.suppress(OSError):
        if pipe is not None:
            pipe.close()


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _last_words(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    process.kill()
    lines = [line.strip() for line in process.stderr.read().decode(errors="replace").splitlines() if line.strip()]
    return "; ".join(lines[-2:]) or f"the connection ended with exit code {process.wait()}"
