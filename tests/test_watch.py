"""`status`, `logs` and `stop` on runs that live, have ended, and were killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.errors import ConfigError
from launcher.rundir import RunDir, complete_checkpoints
from launcher.running.agent import find_run
from launcher.running.state import find_folder, find_state, list_runs
from tests.running_support import Run, running, stand_in, wait_until


@pytest.fixture
def folder(runs: Path) -> Path:
    """A run folder as status and stop want it; the tests' rank programs need no plan."""
    made = runs / "first"
    made.mkdir()
    (made / "plan.json").write_text(json.dumps({"config": {"cluster": {"stop_grace_s": 20}}}))
    return made


def watch(run: Run, verb: str, *argv: str) -> int:
    return main([verb, *argv, "--root", str(run.dir.path.parent)])


def test_running_run_is_shown_followed_and_stopped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(folder, stand_in()) as run:
        pids = run.training()
        assert watch(run, "status", "latest") == 0
        shown = capsys.readouterr().out
        assert f"running, supervised by process {run.process.pid}" in shown
        assert f"process {pids[1]} on localhost" in shown
        follow = subprocess.Popen(_verb("logs", "-f", "--rank", "1", str(folder)), stdout=subprocess.PIPE, text=True)
        assert watch(run, "stop", "first") == 0
        assert "stopped (exit code 143)" in capsys.readouterr().out
        assert run.end()[0] == 143
        assert "this rank stops after the current step" in follow.communicate(timeout=20)[0]
        assert watch(run, "stop", "first") == 0
        assert "nothing to stop" in capsys.readouterr().out


def test_failed_run_tells_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(folder, stand_in("1:raise")) as run:
        run.end()
    assert watch(run, "status") == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in table] == [["run", "state"], ["first", "failed"]]
    assert watch(run, "status", "first") == 0
    assert "rank 1 on localhost failed: ValueError: row 7 has no positive document" in capsys.readouterr().out
    assert watch(run, "logs", "first", "--errors") == 0
    assert "localhost.1: ValueError: row 7 has no positive document" in capsys.readouterr().out
    assert watch(run, "logs", "first", "--rank", "7") == 2
    assert "localhost.0.log, localhost.1.log" in capsys.readouterr().err


def test_killed_supervisor_is_not_called_running(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(folder, stand_in("1:deaf"), stop_grace_s=600.0) as run:
        run.training()
        run.process.kill()
        run.process.wait()
        state = find_state(run.dir)
        assert state.name == "ending"
        # The agent would wait for the deaf rank; a person need not.
        (folder / "plan.json").write_text(json.dumps({"config": {"cluster": {"stop_grace_s": -29}}}))
        assert watch(run, "stop", "first") == 0
        assert find_run(run.order["run_id"]) == []
    assert find_state(run.dir).name == "lost"
    assert watch(run, "status", "first") == 0
    assert "gone; said last: running" in capsys.readouterr().out


def test_pid_of_another_process_is_not_the_supervisor(folder: Path) -> None:
    with running(folder, stand_in("steps=2")) as run:
        run.end()
    run.dir.outcome.unlink()
    file = folder / "supervisor.json"
    supervisor = json.loads(file.read_text())
    supervisor["pid"] = os.getpid()  # lives, but did not start when the supervisor did
    file.write_text(json.dumps(supervisor))
    assert find_state(run.dir).name == "lost"
    assert main(["stop", str(folder)]) == 0  # and this process lives on


def test_ended_run_says_what_it_left_and_how_to_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(folder, stand_in()) as run:
        run.training()
        run.dir.report.write_text("")
        assert watch(run, "stop", "first") == 0
        stopped = capsys.readouterr().out.splitlines()
    resume = f"resume  python -m launcher resume {folder}   (from {complete_checkpoints(run.dir)[-1].name})"
    assert stopped[-1] == resume
    assert watch(run, "status", "first") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [f"report  {run.dir.report}", resume]
    assert watch(run, "logs", "first", "--errors") == 0
    assert capsys.readouterr() == ("", f"no line in {run.dir.logs} tells of an error\n")
    outcome = json.loads(run.dir.outcome.read_text())
    run.dir.outcome.write_text(json.dumps({**outcome, "status": "done"}))
    assert watch(run, "status", "first") == 0
    assert "resume  " not in capsys.readouterr().out  # nothing is left to train


def test_table_shows_the_score_that_decides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plan.json").write_text(json.dumps({"config": {"eval": {"metric": "mrr@10"}}}))
    scores = [{"kind": "eval", "step": step, "eval/ndcg@10": 0.9, "eval/mrr@10": step / 10} for step in (0, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    assert main(["status", "--root", str(folder.parent)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["first", "lost", "-", "-", "mrr@10", "0.5000"]


def test_stop_never_guesses_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--root", str(folder.parent)]) == 2
    assert "python -m launcher stop RUN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [("nothing", "no run folder nothing"), ("latest", "no run in"), (".", "no plan.json")],
)
def test_wrong_folder_is_code_2(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    monkeypatch.chdir(runs)
    for verb in ("status", "logs", "stop"):
        assert main([verb, name]) == 2
        assert text in capsys.readouterr().err


def test_damaged_outcome_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "outcome.json").write_text('{"status": ')
    assert main(["status", str(folder)]) == 2
    assert "outcome.json cannot be read" in capsys.readouterr().err


def test_latest_is_the_newest_start(runs: Path) -> None:
    for age, name in enumerate(("new", "old")):
        (runs / name).mkdir()
        (runs / name / "plan.json").write_text("{}")
        os.utime(runs / name / "plan.json", (1e9 - age, 1e9 - age))
    assert [run.path.name for run in list_runs(str(runs))] == ["new", "old"]
    assert find_folder("latest", str(runs)) == RunDir(runs / "new")
    with pytest.raises(ConfigError, match="no run folder"):
        find_folder("newer", str(runs))


def test_second_stop_ends_at_once(folder: Path) -> None:
    with running(folder, stand_in("1:deaf"), stop_grace_s=600.0) as run:
        run.training()
        stops = [subprocess.Popen(_verb("stop", str(folder)), stdout=subprocess.PIPE, text=True)]
        assert stops[0].stdout is not None
        stops[0].stdout.readline()
        stops.append(subprocess.Popen(_verb("stop", str(folder)), stdout=subprocess.PIPE, text=True))
        code, _, outcome = run.end()
        assert (code, outcome["status"]) == (143, "interrupted")
        assert [stop.wait(timeout=20) for stop in stops] == [0, 0]
        wait_until(lambda: find_state(run.dir).over, 5, "the run is over")
    assert outcome["exit_code"] == 128 + signal.SIGTERM


def _verb(verb: str, *argv: str) -> list[str]:
    return [sys.executable, "-m", "launcher", verb, *argv]
