"""The agent over real processes: it ends what it started, all of it, and nothing else; and it tells the truth."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running_support import RANK, RANKS, Watched, order, stand_in, wait_until

from launcher.running.agent import find_run, is_alive, read_process


def test_ranks_that_are_done_end_well(runs: Path) -> None:
    agent = Watched(runs, stand_in("steps=5"))
    agent.done()
    assert {rank: (e["exit_code"], e["signal"], e["by_us"]) for rank, e in agent.exits().items()} == {
        0: (0, None, False),
        1: (0, None, False),
    }
    assert agent.whys() == []
    assert "rank 1 is here" in agent.run.log("localhost", 1).read_text()


@pytest.mark.parametrize(
    ("deed", "code", "number"),
    [("raise", 4, None), ("kill9", None, signal.SIGKILL), ("segfault", None, signal.SIGSEGV), ("exit0", 0, None)],
)
def test_first_failure_ends_the_others(runs: Path, deed: str, code: int | None, number: int | None) -> None:
    agent = Watched(runs, stand_in(f"1:{deed}"))
    agent.until("ending")
    begun = time.monotonic()
    agent.done()
    assert time.monotonic() - begun < 10
    assert agent.whys()[0] == "failure"
    guilty, other = agent.exits()[1], agent.exits()[0]
    assert (guilty["exit_code"], guilty["signal"], guilty["by_us"]) == (code, number, False)
    assert other["exit_code"] == 0 or other["by_us"]


def test_error_travels_with_its_traceback(runs: Path) -> None:
    agent = Watched(runs, stand_in("0:raise"))
    error = agent.until("rank", state="failed")["status"]["error"]
    assert (error["type"], error["message"], error["exit_code"]) == ("ValueError", "row 7 has no positive document", 4)
    assert "rank.py" in error["traceback"]
    agent.done()


def test_crash_in_native_code_leaves_its_stack(runs: Path) -> None:
    agent = Watched(runs, stand_in("1:segfault"))
    agent.done()
    assert "Segmentation fault" in agent.run.log("localhost", 1).read_text()


def test_failure_before_the_log_is_open_is_in_the_node_log(runs: Path) -> None:
    agent = Watched(runs, stand_in("1:die"))
    agent.done()
    # Such a rank may be gone before it was ever seen; its node launcher passes the code on.
    assert next(event for event in agent.seen if event["event"] == "launcher_exit")["exit_code"] == 1
    assert "failure" in agent.whys()
    assert "no such library" in agent.run.node_log("localhost").read_text()


def test_dead_node_launcher_takes_its_ranks_along(runs: Path) -> None:
    agent = Watched(runs, stand_in("1:killparent"))
    agent.done()
    end = next(event for event in agent.seen if event["event"] == "launcher_exit")
    assert (end["signal"], end["by_us"]) == (signal.SIGKILL, False)
    assert agent.whys()[0] == "failure"


def test_stop_lets_ranks_finish_their_step(runs: Path) -> None:
    agent = Watched(runs, stand_in())
    agent.all_running()
    agent.link.send({"do": "stop"})
    agent.done()
    assert agent.whys() == ["stop"]
    assert {event["exit_code"] for event in agent.exits().values()} == {0}
    assert {json.loads(agent.run.rank(rank).read_text())["state"] for rank in range(RANKS)} == {"stopped"}


def test_deaf_rank_is_killed_after_the_grace(runs: Path) -> None:
    agent = Watched(runs, stand_in("1:deaf"), stop_grace_s=1.0)
    agent.all_running()
    agent.link.send({"do": "stop"})
    agent.done()
    end = agent.exits()[1]
    assert (end["signal"], end["by_us"]) == (signal.SIGKILL, True)


def test_stop_before_any_rank_has_started(runs: Path) -> None:
    agent = Watched(runs, [sys.executable, "-c", "import time; time.sleep(60)"])
    agent.until("started")
    agent.link.send({"do": "stop"})
    agent.done()
    assert agent.whys() == ["stop"]


def test_lost_supervisor_stops_the_run(runs: Path) -> None:
    agent = Watched(runs, stand_in())
    agent.all_running()
    assert agent.link.process.stdin is not None
    agent.link.process.stdin.close()
    agent.done()
    assert {json.loads(agent.run.rank(rank).read_text())["state"] for rank in range(RANKS)} == {"stopped"}


def test_killed_agent_takes_everything_along(runs: Path) -> None:
    agent = Watched(runs, stand_in())
    agent.all_running()
    agent.link.process.kill()
    agent.until("lost")
    wait_until(lambda: not agent.left(), 5, "no process is left")


def test_helpers_of_ranks_end_with_the_run(runs: Path) -> None:
    agent = Watched(runs, stand_in("1:helper", "0:raise"))
    agent.done()


def test_bystander_with_the_same_command_line_lives(runs: Path, tmp_path: Path) -> None:
    bystander = Watched(tmp_path, stand_in())
    pids = bystander.all_running()
    born = {pid: process.start for pid in pids.values() if (process := read_process(pid))}
    agent = Watched(runs, stand_in())
    agent.all_running()
    agent.link.send({"do": "kill"})
    agent.done()
    assert len(born) == RANKS
    assert all(is_alive(pid, start) for pid, start in born.items())
    bystander.link.send({"do": "kill"})
    bystander.done()


def test_reader_that_sleeps_does_not_stop_the_agent(runs: Path) -> None:
    """A supervisor suspended with Ctrl-Z reads nothing; a failure must end the run all the same."""
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, b" " * 4096)
    agent = subprocess.Popen([sys.executable, "-m", "launcher.running.agent"], stdin=subprocess.PIPE, stdout=full)
    asked = order(runs, stand_in("1:raise"))
    assert agent.stdin is not None
    agent.stdin.write(json.dumps(asked).encode() + b"\n")
    agent.stdin.flush()
    wait_until((runs / "ranks" / "1.json").exists, 20, "rank 1 has started")
    wait_until(lambda: not find_run(asked["run_id"]), 10, "all ranks are down")
    assert agent.wait(timeout=20) == 0
    agent.stdin.close()
    os.close(unread)
    os.close(full)


def test_rank_without_its_node_launcher_leaves(runs: Path) -> None:
    """The race: the node launcher dies before the rank has asked the kernel to die with it."""
    env = {**os.environ, "RANK": "0", "LAUNCHER_RUN_ID": "never-started"}
    argv = [sys.executable, RANK, "train", "--plan", f"{runs}/plan.json", "steps=2"]
    ended = subprocess.run(argv, env=env, timeout=30, check=False)
    assert ended.returncode == 1
    assert "node launcher" in (runs / "logs" / "localhost.0.log").read_text()
