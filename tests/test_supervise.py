"""Whole runs of small rank programs under a real supervisor, through every way in which one can end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from launcher.running.agent import find_run
from tests.running_support import deepspeed, running, stand_in, wait_until


def test_done_ends_with_the_table_before_and_after(runs: Path) -> None:
    with running(runs, stand_in("steps=5")) as run:
        code, text, outcome = run.end()
    assert code == 0
    assert (outcome["status"], outcome["exit_code"], outcome["steps"], outcome["failures"]) == ("done", 0, 5, [])
    assert outcome["eval"]["before"]["eval/ndcg@10"] == 0.49
    assert outcome["eval"]["after"]["eval/ndcg@10"] == 0.97
    table = text[text.index("\ndone\n") :]
    assert [line.split() for line in table.splitlines()[2:4]] == [
        ["before", "end", "(step", "5)"],
        ["ndcg@10", "0.4900", "0.9700"],
    ]
    assert "step 5/5" in text


def test_rank_that_raises_is_named_with_its_traceback(runs: Path) -> None:
    with running(runs, deepspeed("1:raise")) as run:
        code, text, outcome = run.end()
    assert code == 4
    assert outcome["status"] == "failed"
    first = outcome["first_failure"]
    assert (first["rank"], first["host"], first["exit_code"]) == (1, "localhost", 4)
    assert first["error"]["type"] == "ValueError"
    end = text[text.index("rank 1 on localhost failed") :]
    assert end.startswith("rank 1 on localhost failed: ValueError: row 7 has no positive document\n")
    assert 'raise ValueError("row 7 has no positive document")' in end
    assert str(run.dir.log("localhost", 1).name) in end


@pytest.mark.parametrize(
    ("deed", "expected", "message"),
    [
        ("config", 2, "dataset.max_length=4 is shorter than the prompt"),
        ("full", 3, "/runs/x: No space left on device"),
    ],
)
def test_error_for_people_has_its_own_code_and_no_traceback(runs: Path, deed: str, expected: int, message: str) -> None:
    with running(runs, stand_in(f"0:{deed}")) as run:
        code, text, outcome = run.end()
    assert (code, outcome["exit_code"]) == (expected, expected)
    assert text.count(f"1 problem with this run:\n      {message}") == 1
    assert "Traceback" not in text
    assert "Error:" not in text


def test_rank_that_leaves_early_is_a_failure(runs: Path) -> None:
    with running(runs, stand_in("1:exit0")) as run:
        code, text, outcome = run.end()
    assert code == 4
    assert outcome["first_failure"]["rank"] == 1
    assert "rank 1 on localhost left with exit code 0 at step" in text


def test_failure_before_the_log_is_open_shows_the_node_log(runs: Path) -> None:
    with running(runs, stand_in("1:die")) as run:
        code, text, outcome = run.end()
    assert code == 4
    assert "no such library" in text
    assert outcome["first_failure"]["log"] == str(run.dir.node_log("localhost"))


def test_crash_after_everything_was_done_is_a_note(runs: Path) -> None:
    with running(runs, stand_in("steps=4", "1:abort")) as run:
        code, text, outcome = run.end()
    assert (code, outcome["status"]) == (0, "done")
    assert "rank 1 crashed while it left, after all was done" in text


def test_node_launcher_that_cannot_start_is_the_machine(runs: Path) -> None:
    with running(runs, [sys.executable, "-m", "no_such_module"]) as run:
        code, text, _ = run.end()
    assert code == 3
    assert "No module named no_such_module" in text


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)],
    ids=str,
)
def test_signal_stops_and_saves(runs: Path, number: signal.Signals, code: int) -> None:
    """P04: a signal to the command ends the ranks too."""
    with running(runs, stand_in()) as run:
        run.training()
        run.process.send_signal(number)
        ended, text, outcome = run.end()
    assert ended == code
    assert (outcome["status"], outcome["exit_code"], outcome["failures"]) == ("stopped", code, [])
    assert Path(outcome["last_checkpoint"], "COMPLETE").exists()
    assert "python -m launcher resume" in text


def test_stop_while_loading_saves_nothing_and_does_not_wait(runs: Path) -> None:
    with running(runs, stand_in("0:load", "1:load"), stop_grace_s=600.0) as run:
        wait_until(lambda: run.dir.rank(0).exists() and run.dir.rank(1).exists(), 40, "ranks load")
        run.process.send_signal(signal.SIGINT)
        code, text, outcome = run.end(timeout_s=10)
    assert (code, outcome["status"], outcome["last_checkpoint"]) == (130, "stopped", None)
    assert "stopped after step 0" in text


def test_second_signal_ends_at_once(runs: Path) -> None:
    """P10: a rank that ignores SIGTERM included."""
    with running(runs, stand_in("1:deaf"), stop_grace_s=600.0) as run:
        run.training()
        run.process.send_signal(signal.SIGINT)
        time.sleep(1)
        run.process.send_signal(signal.SIGINT)
        code, _, outcome = run.end(timeout_s=10)
    assert (code, outcome["status"]) == (130, "interrupted")


def test_killed_supervisor_leaves_nobody(runs: Path) -> None:
    """P04 P10: not even a child of a rank in a session of its own."""
    with running(runs, stand_in("1:helper")) as run:
        run.training()
        run.process.kill()
        wait_until(lambda: not find_run(run.order["run_id"]), 15, "no process is left")
        assert not run.dir.outcome.exists()
        assert json.loads(run.dir.rank(0).read_text())["state"] == "stopped"  # they saved


def test_lines_that_are_none_do_not_end_a_run(runs: Path) -> None:
    with running(runs, stand_in()) as run:
        run.training()
        with open(run.dir.metrics, "a") as file:
            file.write('{"kind": "step"}\n{"kind": "eval", "step": [1], "eval/x": "y"}\n{"kind": "eval", "step": 1}\n[')
        with open(run.dir.events, "a") as file:
            file.write('{"event": "checkpoint", "path": ""}\n{"event": []}\n{"event": "resumed", "step": "x"}\n')
        time.sleep(1.0)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGTERM)
        code, text, outcome = run.end()
    assert (code, outcome["status"]) == (143, "stopped")
    assert text.count("not all can be shown") == 1


def test_report_that_cannot_be_written_changes_nothing(runs: Path) -> None:
    with running(runs, stand_in("steps=5")) as run:
        run.dir.report.mkdir()
        code, text, outcome = run.end()
    assert (code, outcome["status"]) == (0, "done")
    assert "no report: internal error: IsADirectoryError" in text


def test_a_signal_without_a_name_is_told(runs: Path) -> None:
    with running(runs, stand_in()) as run:
        os.kill(run.training()[1], 40)
        code, text, outcome = run.end()
    assert (code, outcome["failures"][0]["signal_name"]) == (4, "signal 40")
    assert "rank 1 on localhost died of signal 40\n" in text


def test_lost_agent_is_told_and_leaves_nobody(runs: Path) -> None:
    with running(runs, stand_in("1:helper")) as run:
        run.training()
        parents = {p.parent for p in find_run(run.order["run_id"])}
        launcher = next(p for p in find_run(run.order["run_id"]) if p.pid in parents)
        os.kill(launcher.parent, signal.SIGKILL)
        code, text, _ = run.end()
    assert code == 4
    assert "agent" in text


def test_terminal_that_goes_away_does_not_end_the_run_badly(runs: Path) -> None:
    with running(runs, stand_in("steps=40")) as run:
        run.training()
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert run.process.wait(timeout=60) == 0
        assert json.loads(run.dir.outcome.read_text())["status"] == "done"
