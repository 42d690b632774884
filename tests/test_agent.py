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

from launcher.running.agent import find_run, is_alive, read_process
from launcher.running.transport import BOOT, program_source
from tests.running_support import RANK, RANKS, Watched, order, stand_in, wait_until


def test_ranks_that_are_done_end_well(runs: Path) -> None:
    watched = Watched(runs, stand_in("steps=5"))
    watched.done()
    assert {rank: (e["exit_code"], e["signal"], e["by_us"]) for rank, e in watched.exits().items()} == {
        0: (0, None, False),
        1: (0, None, False),
    }
    assert watched.whys() == []
    assert "rank 1 is here" in watched.run.log("localhost", 1).read_text()


@pytest.mark.parametrize(
    ("deed", "code", "number"),
    [("raise", 4, None), ("kill9", None, signal.SIGKILL), ("segfault", None, signal.SIGSEGV), ("exit0", 0, None)],
)
def test_first_failure_ends_the_others(runs: Path, deed: str, code: int | None, number: int | None) -> None:
    watched = Watched(runs, stand_in(f"1:{deed}"))
    watched.until("ending")
    begun = time.monotonic()
    watched.done()
    assert time.monotonic() - begun < 10
    assert watched.whys()[0] == "failure"
    guilty, other = watched.exits()[1], watched.exits()[0]
    assert (guilty["exit_code"], guilty["signal"], guilty["by_us"]) == (code, number, False)
    assert other["exit_code"] == 0 or other["by_us"]


def test_error_travels_with_its_traceback(runs: Path) -> None:
    watched = Watched(runs, stand_in("0:raise"))
    error = watched.until("rank", state="failed")["status"]["error"]
    assert (error["type"], error["message"], error["exit_code"]) == ("ValueError", "row 7 has no positive document", 4)
    assert "rank.py" in error["traceback"]
    watched.done()


def test_crash_in_native_code_leaves_its_stack(runs: Path) -> None:
    watched = Watched(runs, stand_in("1:segfault"))
    watched.done()
    assert "Segmentation fault" in watched.run.log("localhost", 1).read_text()


def test_failure_before_the_log_is_open_is_in_the_node_log(runs: Path) -> None:
    watched = Watched(runs, stand_in("1:die"))
    watched.done()
    # Such a rank may be gone before it was ever seen; its node launcher passes the code on.
    assert next(event for event in watched.seen if event["event"] == "launcher_exit")["exit_code"] == 1
    assert "failure" in watched.whys()
    assert "no such library" in watched.run.node_log("localhost").read_text()


def test_dead_node_launcher_takes_its_ranks_along(runs: Path) -> None:
    """P02: no rank outlives its node launcher."""
    watched = Watched(runs, stand_in("1:killparent"))
    watched.done()
    end = next(event for event in watched.seen if event["event"] == "launcher_exit")
    assert (end["signal"], end["by_us"]) == (signal.SIGKILL, False)
    assert watched.whys()[0] == "failure"


def test_stop_lets_ranks_finish_their_step(runs: Path) -> None:
    watched = Watched(runs, stand_in())
    watched.all_running()
    watched.link.send({"do": "stop"})
    watched.done()
    assert watched.whys() == ["stop"]
    assert {event["exit_code"] for event in watched.exits().values()} == {0}
    assert {json.loads(watched.run.rank(rank).read_text())["state"] for rank in range(RANKS)} == {"stopped"}


def test_deaf_rank_is_killed_after_the_grace(runs: Path) -> None:
    """P10: SIGKILL for what ignores SIGTERM."""
    watched = Watched(runs, stand_in("1:deaf"), stop_grace_s=1.0)
    watched.all_running()
    watched.link.send({"do": "stop"})
    watched.done()
    end = watched.exits()[1]
    assert (end["signal"], end["by_us"]) == (signal.SIGKILL, True)


def test_stop_before_any_rank_has_started(runs: Path) -> None:
    watched = Watched(runs, [sys.executable, "-c", "import time; time.sleep(60)"])
    watched.until("started")
    watched.link.send({"do": "stop"})
    watched.done()
    assert watched.whys() == ["stop"]


def test_lost_supervisor_stops_the_run(runs: Path) -> None:
    watched = Watched(runs, stand_in())
    watched.all_running()
    assert watched.link.process.stdin is not None
    watched.link.process.stdin.close()
    watched.done()
    assert {json.loads(watched.run.rank(rank).read_text())["state"] for rank in range(RANKS)} == {"stopped"}


def test_killed_agent_takes_everything_along(runs: Path) -> None:
    watched = Watched(runs, stand_in())
    watched.all_running()
    watched.link.process.kill()
    watched.until("lost")
    wait_until(lambda: not watched.left(), 5, "no process is left")


def test_helpers_of_ranks_end_with_the_run(runs: Path) -> None:
    """P10: a data loader's children hold GPU memory."""
    watched = Watched(runs, stand_in("1:helper", "0:raise"))
    watched.done()


def test_bystander_with_the_same_command_line_lives(runs: Path, tmp_path: Path) -> None:
    """P05 P12: only what this run has started is signalled."""
    bystander = Watched(tmp_path, stand_in())
    pids = bystander.all_running()
    born = {pid: process.start for pid in pids.values() if (process := read_process(pid))}
    watched = Watched(runs, stand_in())
    watched.all_running()
    watched.link.send({"do": "kill"})
    watched.done()
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
    process = subprocess.Popen([sys.executable, "-c", BOOT], stdin=subprocess.PIPE, stdout=full)
    asked = order(runs, stand_in("1:raise"))
    assert process.stdin is not None
    process.stdin.write(program_source("agent") + json.dumps(asked).encode() + b"\n")
    process.stdin.flush()
    wait_until((runs / "ranks" / "1.json").exists, 20, "rank 1 has started")
    wait_until(lambda: not find_run(asked["run_id"]), 10, "all ranks are down")
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    os.close(unread)
    os.close(full)


def test_rank_without_its_node_launcher_leaves(runs: Path) -> None:
    """The race: the node launcher dies before the rank has asked the kernel to die with it."""
    env = {**os.environ, "RANK": "0", "LAUNCHER_RUN_ID": "never-started"}
    argv = [sys.executable, RANK, "train", "--plan", f"{runs}/plan.json", "steps=2"]
    ended = subprocess.run(argv, env=env, timeout=30, check=False)
    assert ended.returncode == 1
    assert "node launcher" in (runs / "logs" / "localhost.0.log").read_text()


def test_agent_is_one_file_that_runs_alone(runs: Path) -> None:
    """So that it can be sent to a host that has nothing of the package."""
    asked = program_source("agent") + json.dumps(order(runs, stand_in())).encode() + b"\n"
    argv = [sys.executable, "-I", "-c", BOOT]
    ended = subprocess.run(argv, input=asked, cwd="/", capture_output=True, check=True)
    events = [json.loads(line) for line in ended.stdout.splitlines() if line]
    assert [event["event"] for event in events] == ["started", "ending", "launcher_exit", "done"]
    assert events[1]["why"] == "stop"  # its input had ended: the supervisor is gone
    assert events[-1]["survivors"] == []
