"""Contact between a supervisor and its hosts, over real ssh servers: lost and found again, lost for good, gone."""

from __future__ import annotations

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

import pytest

from launcher.rundir import RunDir
from launcher.running.agent import Order
from launcher.running.contact import Contact
from launcher.running.transport import Channel, Door
from launcher.spec import Host, plan_to_json
from tests.cluster import Cluster, await_that
from tests.planning_support import plan
from tests.running_support import PROCESSES, RANK, command_of

REPO = PROCESSES.parent.parent


class OnHosts:
    """A supervisor on the head over one rank each on n1 and n2."""

    def __init__(self, cluster: Cluster, folder: Path, deeds: tuple[str, ...], options: dict[str, Any]) -> None:
        self.cluster, self.dir = cluster, RunDir(folder)
        self.run_id = f"test-{uuid.uuid4().hex}"
        home = Path(options.pop("run_dir", folder))  # the run folder as the hosts call it
        names = [host.name for host in cluster.hosts[:2]]
        hosts = tuple(Host(name=name, gpus=(0,)) for name in names)
        planned = dataclasses.replace(plan(), run_dir=str(folder), hosts=hosts, transport="ssh", run_id=self.run_id)
        self.dir.plan.write_text(plan_to_json(planned))
        orders = [self._order(home, name, rank, deeds, options) for rank, name in enumerate(names)]
        (folder / "orders.json").write_text(json.dumps(orders))
        argv = [sys.executable, PROCESSES / "supervisor.py", folder, folder / "orders.json"]
        self.process = cluster.head.popen(argv, stdout=subprocess.PIPE, text=True, cwd=folder)

    def _order(
        self, home: Path, host: str, rank: int, deeds: tuple[str, ...], options: dict[str, Any]
    ) -> dict[str, Any]:
        program = [sys.executable, str(PROCESSES / "node.py"), "1", RANK]
        program += ["train", "--plan", f"{home}/plan.json", *deeds]
        return {
            "run_id": self.run_id,
            "host": host,
            "run_dir": str(home),
            "cwd": str(REPO),
            "argv": program,
            "env": {"PYTHONPATH": os.environ["PYTHONPATH"], "FIRST_RANK": str(rank), "HOST": host},
            "ranks": [rank],
            "stop_grace_s": 20.0,
            "lost_contact_s": 60.0,
            "files": {"plan.json": self.dir.plan.read_text()},
            **options,
        }

    def training(self) -> None:
        """Wait until both ranks train."""

        def states() -> list[Any]:
            return [json.loads(path.read_text())["state"] for path in self.dir.ranks.glob("[01].json")]

        await_that(lambda: states() == ["running"] * 2, 30, lambda: f"ranks are {states()}")

    def left(self) -> dict[str, list[int]]:
        """What Python runs on the hosts; the server's end of a connection that was cut off may outlive it for long."""
        return {host.name: [pid for pid in host.pids() if _is_python(pid)] for host in self.cluster.hosts[:2]}

    def nothing_left(self, within_s: float) -> None:
        """Wait until no process of the run or of its connections lives on a host."""
        await_that(lambda: not any(self.left().values()), within_s, lambda: f"still there: {self.left()}")

    def end(self, timeout_s: float = 40) -> tuple[int, str, dict[str, Any]]:
        """Exit code, text on the terminal, outcome.json."""
        text, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, text, json.loads(self.dir.outcome.read_text())


def _clients(run: OnHosts, host: str) -> list[int]:
    """The ssh processes of a supervisor to one host."""
    pgrep = ["pgrep", "-P", str(run.process.pid), "-f", "-x", f"ssh .* -- {host} .*"]
    return [int(pid) for pid in subprocess.run(pgrep, capture_output=True, text=True, check=True).stdout.split()]


def _is_python(pid: int) -> bool:
    return b"python" in command_of(pid)


@contextmanager
def on_hosts(cluster: Cluster, folder: Path, *deeds: str, **options: Any) -> Iterator[OnHosts]:
    """A supervised run on two hosts that leaves nothing behind."""
    run = OnHosts(cluster, folder, deeds, options)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        cluster.clear()


def test_two_hosts_end_as_one_run(cluster: Cluster, runs: Path) -> None:
    with on_hosts(cluster, runs, "steps=20") as run:
        code, text, outcome = run.end()
        assert (code, outcome["status"]) == (0, "done"), text
        assert (runs / "logs" / "n1.0.log").exists() and (runs / "logs" / "n2.1.log").exists()
        run.nothing_left(3)


def test_failure_on_one_host_ends_the_other(cluster: Cluster, runs: Path) -> None:
    """P03 P07 over ssh."""
    with on_hosts(cluster, runs, "1:raise") as run:
        code, text, outcome = run.end()
        assert code == 4, text
        assert outcome["first_failure"]["host"] == "n2" and outcome["first_failure"]["rank"] == 1
        assert "row 7 has no positive document" in text
        run.nothing_left(3)


def test_lost_connection_is_opened_again(cluster: Cluster, runs: Path) -> None:
    """The ranks go on meanwhile, and the end is a good one."""
    with on_hosts(cluster, runs, "steps=80") as run:
        run.training()
        [client] = _clients(run, "n2")
        os.kill(client, signal.SIGKILL)
        code, text, outcome = run.end()
        assert (code, outcome["status"]) == (0, "done"), text
        assert "contact with n2 is lost (signal 9)" in text
        assert "contact with n2 is back" in text
        run.nothing_left(3)


def test_end_that_is_lost_on_its_way_is_said_again(cluster: Cluster, runs: Path) -> None:
    """An agent may have written all, and the connection break before it has arrived."""
    home = cluster.private / "run"
    with on_hosts(cluster, runs, "steps=40", run_dir=str(home)) as run:
        run.training()
        [client] = _clients(run, "n2")
        os.kill(client, signal.SIGSTOP)
        state = cluster.hosts[1].path(home / "ranks" / "1.json")
        await_that(lambda: json.loads(state.read_text())["state"] == "done", 20, state.read_text)
        time.sleep(2.5)  # the node launcher reaps its ranks once a second
        os.kill(client, signal.SIGKILL)
        code, text, outcome = run.end()
        assert (code, outcome["status"]) == (0, "done"), text
        run.nothing_left(3)


def test_guard_that_is_killed_is_replaced(cluster: Cluster, runs: Path) -> None:
    with on_hosts(cluster, runs, "steps=120", lost_contact_s=3.0) as run:
        run.training()
        pgrep = ["pgrep", "-P", str(run.process.pid), "-f", "guard.py"]
        os.kill(int(subprocess.run(pgrep, capture_output=True, text=True, check=True).stdout), signal.SIGKILL)
        code, text, outcome = run.end()
        assert (code, outcome["status"]) == (0, "done"), text


def test_next_start_has_a_new_connection_to_a_host_that_was_lost() -> None:
    """The old one hangs, and would lead to the old agent once the host is back."""
    channel = Channel(Door("n2", ("sleep", "60"), False), queue.Queue())
    order = Order("test", "n2", "/r", "/", ["true"], {}, [0], stop_grace_s=1.0, lost_contact_s=0.1)
    contact = Contact([order], {"n2": channel}, {}, lambda *_, **__: None)
    time.sleep(0.2)
    assert [event["event"] for event in contact.tick()] == ["lost"]
    assert channel.over and contact.over
    channel.inbox.put({"event": "lost", "host": "n2", "time": 0, "received": 0, "exit_code": 255})
    contact.close(channel.inbox)
    assert contact.channels["n2"].over


def test_folder_that_hosts_do_not_see_is_mirrored(cluster: Cluster, runs: Path) -> None:
    with on_hosts(cluster, runs, "steps=30", run_dir=str(cluster.private / "run")) as run:
        code, text, outcome = run.end()
        assert (code, outcome["status"]) == (0, "done"), text
        assert "rank 1 is here" in (runs / "logs" / "n2.1.log").read_text()
        steps = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
        assert [line["step"] for line in steps if line["kind"] == "step"] == list(range(1, 31))
        assert json.loads(run.dir.rank(1).read_text())["state"] == "done"


def test_killed_supervisor_leaves_nothing(cluster: Cluster, runs: Path) -> None:
    """P04 over ssh."""
    with on_hosts(cluster, runs) as run:
        run.training()
        run.process.kill()
        run.nothing_left(10)
        assert (runs / "checkpoints").is_dir()  # the ranks were asked to stop, not killed


def test_host_that_is_cut_off_is_lost_in_time(cluster: Cluster, runs: Path) -> None:
    """Its agent ends its ranks when nobody speaks to it; the others are ended when it has been away too long."""
    with on_hosts(cluster, runs, lost_contact_s=4.0) as run:
        run.training()
        cluster.hosts[1].down()
        began = time.monotonic()
        run.process.wait(60)
        assert time.monotonic() - began < 45  # ssh notices after 15 to 20 s of silence
        code, text, outcome = run.end()
        assert code != 0 and "n2" in outcome["first_failure"]["text"], text
        run.nothing_left(15)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_stop_reaches_all_hosts(cluster: Cluster, runs: Path, sign: signal.Signals) -> None:
    """P04 P05 over ssh."""
    with on_hosts(cluster, runs) as run:
        run.training()
        run.process.send_signal(sign)
        code, text, outcome = run.end(20)
        assert code == (130 if sign == signal.SIGINT else 143), text
        assert outcome["status"] == "stopped"
        run.nothing_left(3)
