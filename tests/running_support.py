"""Real agents over small rank programs, for the tests of the running plane."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.rundir import RunDir
from launcher.running.agent import find_run
from launcher.running.transport import BOOT, Channel, Door
from launcher.spec import plan_to_json
from tests.planning_support import plan

PROCESSES = Path(__file__).resolve().parent / "processes"
RANK = str(PROCESSES / "rank.py")
RANKS = 2


def stand_in(*deeds: str) -> list[str]:
    """Command of the stand-in node launcher over two ranks, in the run folder."""
    return [sys.executable, str(PROCESSES / "node.py"), str(RANKS), RANK, "train", "--plan", "plan.json", *deeds]


def deepspeed(*deeds: str) -> list[str]:
    """Command of DeepSpeed's own node launcher over the same two ranks."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(RANKS))}).encode()).decode()
    head = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--node_rank=0"]
    head += ["--master_addr=127.0.0.1", "--master_port=29501", "--no_local_rank"]
    return [*head, RANK, "train", "--plan", "plan.json", *deeds]


def order(run: Path, argv: list[str], *, stop_grace_s: float = 20.0, **more: Any) -> dict[str, Any]:
    """What the supervisor would send to the agent of this machine."""
    return {
        "run_id": f"test-{uuid.uuid4().hex}",
        "host": "localhost",
        "run_dir": str(run),
        "cwd": str(run),
        "argv": argv,
        "env": {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ["PYTHONPATH"]},
        "ranks": list(range(RANKS)),
        "stop_grace_s": stop_grace_s,
        **more,
    }


class Watched:
    """An agent at work and the events it has sent."""

    def __init__(self, run: Path, argv: list[str], **options: Any) -> None:
        self.run = RunDir(run)
        self.order = order(run, argv, **options)
        self.seen: list[dict[str, Any]] = []
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        door = Door("localhost", (sys.executable, "-c", BOOT), local=True)
        self.run.logs.mkdir(parents=True, exist_ok=True)
        self.link = Channel(door, self._events, errors=self.run.node_log("localhost"))
        self.link.start("agent")
        self.link.send(self.order)

    def until(self, event: str, timeout_s: float = 40.0, **status: Any) -> dict[str, Any]:
        """Wait for an event, for `rank` events also for what its status must hold."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                found = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event} {status} within {timeout_s} s in {self.seen}") from None
            self.seen.append(found)
            if found["event"] == event and all(found["status"].get(key) == value for key, value in status.items()):
                return found

    def all_running(self) -> dict[int, int]:
        """Wait until every rank trains; their pids."""
        pids: dict[int, int] = {}
        while len(pids) < RANKS:
            status = self.until("rank", state="running")["status"]
            pids[status["rank"]] = status["pid"]
        return pids

    def done(self) -> list[dict[str, Any]]:
        """Wait for the end; all events, after a check that nothing was left."""
        end = self.until("done")
        self.link.close()
        assert end["survivors"] == []
        assert self.left() == []
        return self.seen

    def left(self) -> list[int]:
        """Pids of this run that live."""
        return [process.pid for process in find_run(self.order["run_id"])]

    def exits(self) -> dict[int, dict[str, Any]]:
        """The `rank_exit` event of each rank."""
        return {event["rank"]: event for event in self.seen if event["event"] == "rank_exit"}

    def whys(self) -> list[str]:
        """Reasons for which the agent has ended its ranks."""
        return [event["why"] for event in self.seen if event["event"] == "ending"]


def command_of(pid: int | str) -> bytes:
    """What a process was started with; nothing once it is gone, which may be at any moment."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """Poll a condition; fail with `what` when it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


class Run:
    """A supervisor process over a run folder."""

    def __init__(self, folder: Path, argv: list[str], *, words: tuple[str, ...] = (), **options: Any) -> None:
        self.dir = RunDir(folder)
        self.order = order(folder, argv, **options)
        (folder / "order.json").write_text(json.dumps([self.order]))
        # The demo's plan: what the ranks really do comes from `argv`.
        self.dir.plan.write_text(plan_to_json(dataclasses.replace(plan(*words), run_dir=str(folder))))
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESSES / "supervisor.py"), str(folder), str(folder / "order.json")],
            stdout=subprocess.PIPE,
            text=True,
        )

    def training(self, ranks: int = 2) -> dict[int, int]:
        """Wait until ranks train; their pids."""
        found: dict[int, int] = {}

        def look() -> bool:
            for path in self.dir.ranks.glob("[0-9].json"):
                status = json.loads(path.read_text())
                if status["state"] == "running":
                    found[status["rank"]] = status["pid"]
            return len(found) == ranks

        wait_until(look, 60, "ranks train")
        return found

    def end(self, timeout_s: float = 60) -> tuple[int, str, dict[str, Any]]:
        """Exit code, text on the terminal, outcome.json; nothing may be left."""
        text, _ = self.process.communicate(timeout=timeout_s)
        assert find_run(self.order["run_id"]) == []
        return self.process.returncode, text, json.loads(self.dir.outcome.read_text())


@contextmanager
def running(folder: Path, argv: list[str], **options: Any) -> Iterator[Run]:
    """A supervised run that leaves nothing behind, whatever the test does."""
    run = Run(folder, argv, **options)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        for process in find_run(run.order["run_id"]):
            os.kill(process.pid, signal.SIGKILL)
