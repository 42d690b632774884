"""When a run counts as hung, who is to blame, and what is done about it and other failures."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.running.agent import find_run
from launcher.running.hang import Hang, HangWatch, Heard, Stack, blame, stacks_text
from launcher.running.journal import JsonTail
from launcher.running.supervisor import ask_by_file
from launcher.training.rankstatus import RankStatus
from tests.running_support import running, stand_in

HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
HANG_S = 600.0

# As faulthandler writes them, main thread last.
WAITING = """Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/v/launcher/training/steps.py", line 20 in prefetched

Current thread 0x00007f10 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/v/deepspeed/comm/torch.py", line 44 in all_reduce
  File "/v/launcher/training/loop.py", line 160 in _train_step
"""
READING = """Thread 0x00007f11 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 2806 in all_reduce

Thread 0x00007f10 (most recent call first):
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 451 in result
  File "/v/launcher/training/steps.py", line 104 in prefetched
"""


def status(rank: int, at: float, **more: Any) -> dict[str, Any]:
    """The event of a rank that has written its state file at `at`."""
    said = {"rank": rank, "state": "running", "phase": "training", "step": 12, "time": at, "pid": 70 + rank, **more}
    return {"event": "rank", "rank": rank, "status": said}


def stack(rank: int, state: str = "S", text: str = WAITING) -> dict[str, Any]:
    return {"event": "stacks", "rank": rank, "state": state, "text": text}


def watch_of(now: float = 0.0, **more: Any) -> HangWatch:
    """A watch that has heard all ranks train."""
    watch = HangWatch(HANG_S, HOSTS, now)
    for rank in HOSTS:
        watch.take(status(rank, now, **more), now)
    return watch


def looks(watch: HangWatch, until: float, since: float = 0.0) -> list[Any]:
    """What is seen once a second."""
    return [found for second in range(int(since), int(until) + 1) if (found := watch.look(float(second))) is not None]


def test_silence_of_all_ranks_is_a_hang_and_names_the_stopped_one() -> None:
    watch = watch_of()
    assert looks(watch, 599) == []
    assert looks(watch, 603, 600) == ["stacks"]  # asked for once
    for rank in HOSTS:
        watch.take(stack(rank, "T" if rank == 2 else "S", "" if rank == 2 else WAITING), 603.5)
    hang = watch.look(604.0)
    assert isinstance(hang, Hang)
    assert hang.text == "no sign of progress for 604 s: rank 2 on n2 is stopped (SIGSTOP), last at step 12 in training"
    assert hang.advice == "kill -CONT 72   (on n2, when it was stopped by hand)"
    assert stacks_text(hang, HOSTS).startswith(
        f"{hang.text}\n\n== rank 2 on n2, process state T\n(no stack)\n\n== rank 0"
    )


def test_one_rank_that_goes_on_is_enough() -> None:
    watch = watch_of()
    for second in range(0, 3000, 2):
        watch.take(status(0, second, phase="exporting"), float(second))
        assert watch.look(float(second)) is None


def test_the_same_said_again_is_no_progress() -> None:
    watch = watch_of()
    for second in range(1, 600, 10):
        watch.take(status(0, 0.0), float(second))
        watch.look(float(second))
    assert looks(watch, 601, 600) == ["stacks"]


@pytest.mark.parametrize("phase", ["starting", "loading model", "starting DeepSpeed", "exporting"])
def test_loading_may_take_three_times_as_long(phase: str) -> None:
    watch = watch_of(phase=phase)
    assert looks(watch, 1799) == []
    assert looks(watch, 1800, 1800) == ["stacks"]


def test_ranks_that_never_report_are_waited_for_as_long() -> None:
    watch = HangWatch(HANG_S, HOSTS, 0.0)
    watch.take(status(0, 0.0), 0.0)
    assert looks(watch, 1799) == []
    assert looks(watch, 1805, 1800)[0] == "stacks"


def test_ranks_that_have_left_count_no_more() -> None:
    watch = watch_of()
    for rank in (1, 2, 3):
        watch.take({"event": "rank_exit", "rank": rank}, 10.0)
    assert looks(watch, 600)[0] == "stacks"
    watch.take({"event": "rank_exit", "rank": 0}, 601.0)
    assert watch.look(650.0) is None


def test_progress_while_stacks_are_fetched_takes_it_back() -> None:
    watch = watch_of()
    assert looks(watch, 600) == ["stacks"]
    watch.take(status(3, 601.0), 601.0)
    assert looks(watch, 1200, 602) == []
    assert looks(watch, 1201, 1201) == ["stacks"]


def test_a_supervisor_that_was_suspended_or_out_of_contact_judges_nobody() -> None:
    watch = watch_of()
    assert watch.look(1.0) is None
    assert watch.look(5000.0) is None  # Ctrl-Z, and what was said meanwhile has yet to be read
    watch.excuse(5300.0)  # contact was lost until now
    assert looks(watch, 5899, 5001) == []
    assert looks(watch, 5900, 5900) == ["stacks"]


def test_hosts_that_do_not_answer_are_not_waited_for_long() -> None:
    watch = watch_of()
    looks(watch, 600)
    for rank in (0, 1):
        watch.take(stack(rank), 601.0)
    assert looks(watch, 604, 601) == []
    hang = watch.look(605.0)
    assert isinstance(hang, Hang)
    assert "rank 2 on n2 does not answer" in hang.text
    assert "== rank 3 on n2: no answer" in stacks_text(hang, HOSTS)


@pytest.mark.parametrize(
    ("stacks", "steps", "expected", "why"),
    [
        ({0: "S", 1: "D", 2: "T", 3: "S"}, {}, 2, "is stopped (SIGSTOP)"),
        ({0: "S", 1: "D", 2: "Z", 3: "S"}, {}, 1, "stuck in the kernel"),
        ({0: "S", 1: "S", 2: "Z", 3: "S"}, {}, 2, "is dead"),
        ({0: "S", 1: "S", 2: "", 3: "S"}, {1: 11}, 1, "is behind the others, which are at step 12"),
        ({0: "S", 1: "S", 2: "S", 3: "R"}, {1: 11}, 3, "does something else while the others wait"),
        ({0: "S", 1: "S", 2: "S", 3: "S"}, {}, 1, "was silent first"),
    ],
)
def test_the_blame(stacks: dict[int, str], steps: dict[int, int], expected: int, why: str) -> None:
    heard = {rank: Heard(3.0 if rank == 1 else 5.0, {"step": steps.get(rank, 12)}) for rank in HOSTS}
    found = {rank: Stack(state, READING if state == "R" else WAITING) for rank, state in stacks.items()}
    rank, said = blame(heard, found)
    assert rank == expected
    assert why in said


def test_steps_that_were_only_written_at_other_times_blame_nobody() -> None:
    heard = {rank: Heard(5.0 - 0.4 * (rank == 2), {"step": 12 - 3 * (rank == 2)}) for rank in HOSTS}
    rank, said = blame(heard, {rank: Stack("S", WAITING) for rank in HOSTS})
    assert (rank, said) == (2, "was silent first, and nothing else sets it apart")


def test_the_main_thread_is_the_last_one() -> None:
    assert Stack("S", WAITING).waits
    assert not Stack("S", READING).waits  # another of its threads does
    assert Stack("S", READING).main[0].endswith("in result")
    assert Stack("S", "no stack at all").main == []


def test_long_work_within_a_step_gives_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = RankStatus(tmp_path / "0.json", 0, "n1")
    status.update(state="running", phase="training", step=7)
    first = json.loads(status.path.read_text())
    assert list(status.each("abc")) == ["a", "b", "c"]
    assert json.loads(status.path.read_text()) == first  # not more often than it is read
    monkeypatch.setattr("launcher.training.rankstatus.BEAT_S", 0.05)
    times = []
    for _ in status.each(range(3)):
        times.append(json.loads(status.path.read_text())["time"])
        time.sleep(0.06)
    times.append(json.loads(status.path.read_text())["time"])
    assert times[0] < times[1] < times[2] < times[3]
    assert json.loads(status.path.read_text()) | {"time": 0} == first | {"time": 0}


def test_a_stopped_rank_is_named_and_all_are_down(runs: Path) -> None:
    words = ("cluster.hang_s=2",)
    with running(runs, stand_in("0:wait", "1:stop"), words=words) as run:
        run.training()
        code, text, outcome = run.end(timeout_s=30)
    assert code == 75
    first = outcome["first_failure"]
    assert (first["cause"], first["rank"], first["host"], len(outcome["failures"])) == ("hang", 1, "localhost", 1)
    end = text[text.rindex("no sign of progress for") :].splitlines()
    assert re.search(r"s: rank 1 on localhost is stopped \(SIGSTOP\), last at step [123] in training$", end[0])
    assert f"  try     {first['advice']}" in end
    stacks = (run.dir.path / "stacks.txt").read_text()
    waits = stacks[stacks.index("== rank 0 on localhost, process state S") :]
    assert "rank.py" in waits and " in do\n" in waits  # where rank 0 really was


def test_a_failed_run_goes_on_from_its_last_checkpoint(runs: Path) -> None:
    with running(runs, stand_in("steps=40", "1:kill9"), words=("restart.max=2",)) as run:
        code, text, outcome = run.end(timeout_s=60)
        assert find_run(f"{run.order['run_id']}.1") == []
    assert (code, outcome["status"], outcome["attempt"], outcome["steps"]) == (0, "done", 2, 40)
    assert "rank 1 on localhost died of SIGKILL" in text and "restart 1 of 2 in 5 s" in text
    assert "  note    restarted 1 of 2 times" in text.splitlines()
    events = [line for line in JsonTail(run.dir.events).read() if line["event"] == "restart"]
    assert [(line["number"], line["of"]) for line in events] == [(1, 2)]


def test_a_stop_asked_by_file_saves_and_ends(runs: Path) -> None:
    with running(runs, stand_in()) as run:
        run.training()
        ask_by_file(run.dir)
        code, _, outcome = run.end(timeout_s=30)
    assert (code, outcome["status"]) == (143, "stopped")
    assert Path(outcome["last_checkpoint"], "COMPLETE").exists()
