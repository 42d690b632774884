"""`status`, `logs` and `stop` on runs that live, have ended, and were killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.errors import ConfigError
from launcher.rundir import RunDir, append_json, complete_checkpoints
from launcher.running.agent import find_run
from launcher.running.state import find_folder, find_state, list_runs
from launcher.running.supervisor import asked_by_file, write_supervisor
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


def test_a_folder_of_runs_is_listed_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(folder.parent)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["first", "lost"]
    assert main(["stop", str(folder.parent)]) == 2
    assert (
        f"a folder of runs; one is wanted\n     try  python -m launcher status {folder.parent}"
        in capsys.readouterr().err
    )


def test_stop_never_guesses_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--root", str(folder.parent)]) == 2
    assert "python -m launcher stop RUN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "the same command in the folder where the run was started"),
        ("latest", "no run in"),
        (".", "no plan.json"),
    ],
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


def files_of(run: RunDir, texts: dict[str, str]) -> None:
    run.logs.mkdir(exist_ok=True)
    for name, text in texts.items():
        (run.logs / f"{name}.log").write_text(text)


def test_logs_of_hosts_are_folded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P07: whole lines with host and rank before them."""
    ranks = {f"n{1 + rank // 2}.{rank}": "attention: sdpa\nerror: disk\n" for rank in range(4)}
    ranks["n2.3"] = "attention: sdpa\n\x1b[31mError: my own\x1b[0m\nerror: disk\nhalf an err"
    files_of(RunDir(folder), {**ranks, "n1.node": "starting\n", "n1.agent": "an error: lost\n", "n10.4": "error: x\n"})
    assert main(["logs", str(folder), "--errors"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "n1.agent: an error: lost",
        "n10.4: error: x",
        "n2.3: Error: my own",
        "n1.0-1,n2.2-3: error: disk",
    ]
    assert main(["logs", str(folder), "--host", "n1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "n1.agent: an error: lost",
        "n1.node: starting",
        "n1.0-1: attention: sdpa",
        "n1.0-1: error: disk",
    ]
    assert main(["logs", str(folder), "--host", "n2", "--rank", "3", "-n", "1"]) == 0
    assert capsys.readouterr().out == "half an err\n"
    assert main(["logs", str(folder), "--host", "n3"]) == 2
    assert "no log of host n3" in capsys.readouterr().err


def test_logs_that_are_opened_later_are_followed_too(folder: Path) -> None:
    with running(folder, stand_in()) as run:
        wait_until(lambda: find_state(run.dir).name == "running", 20, "it is supervised")
        follow = subprocess.Popen(
            _verb("logs", "-f", "--host", "localhost", str(folder)), stdout=subprocess.PIPE, text=True
        )
        run.training()
        assert main(["stop", str(folder)]) == 0
        run.end()
        said = follow.communicate(timeout=20)[0].splitlines()
    assert "localhost.0: rank 0 is here" in said and "localhost.1: rank 1 is here" in said
    assert any(line.startswith("localhost.0-1: SIGTERM: this rank stops") for line in said)


@pytest.fixture
def far(folder: Path) -> RunDir:
    """A run on two hosts of four ranks that is supervised from another machine."""
    run = RunDir(folder)
    hosts = [{"name": name, "gpus": list(range(4))} for name in ("n1", "n2")]
    cluster = {"stop_grace_s": -29.5, "lost_contact_s": 120}
    plan = {"config": {"cluster": cluster, "restart": {"max": 2}}, "hosts": hosts, "run_id": "20260101-000000-abc.1"}
    run.plan.write_text(json.dumps(plan))
    supervisor = {"pid": 1, "start": 1, "boot": "", "host": "elsewhere", "run_id": "20260101-000000-abc.1"}
    (run.path / "supervisor.json").write_text(json.dumps(supervisor))
    run.ranks.mkdir()
    for rank in range(7):
        host = "n1" if rank < 4 else "n2"
        status = {"rank": rank, "host": host, "state": "running", "phase": "training", "step": 20 - rank // 4, "pid": 9}
        run.rank(rank).write_text(json.dumps(status))
    for step in range(1, 21):
        line = {"kind": "step", "step": step, "total_steps": 100, "time": time.time() - 20 + step}
        append_json(run.metrics, line)
    return run


def test_run_on_several_hosts_is_shown_by_host(far: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    append_json(far.events, {"time": 1.0, "event": "restart", "number": 1, "of": 2, "why": "rank 5 on n2 died"})
    lost = {"event": "contact_lost", "host": "n2", "time": time.time() - 40, "reason": "ssh: timed out"}
    append_json(far.events, lost)
    assert main(["status", str(far.path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("state   supervised by process 1 on elsewhere, which cannot be seen from here; its last")
    assert shown[2] == "start   2 of at most 3, after: rank 5 on n2 died"
    assert shown[3].startswith("step    20/100  loss -") and shown[3].endswith("0:01:20 left")
    assert shown[4] == "n1  ranks 0-3: training, step 20"
    assert shown[5] == "n2  ranks 4-7: 3 training, 1 not heard of, step 19; contact lost 40 s ago (ssh: timed out)"
    append_json(far.events, {"event": "contact_back", "host": "n2", "time": time.time()})
    assert main(["status", str(far.path)]) == 0
    assert "contact lost" not in capsys.readouterr().out


def test_stop_from_another_machine_asks_by_file(far: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    stops = subprocess.Popen(_verb("stop", str(far.path)), stdout=subprocess.PIPE, text=True)
    wait_until(lambda: asked_by_file(far) == 1, 10, "it was asked")
    far.outcome.write_text(json.dumps({"status": "stopped", "exit_code": 143}))
    said = stops.communicate(timeout=10)[0].splitlines()
    assert said[0].startswith("asked process 1 on elsewhere to stop, by a file in the run folder: it finishes the step")
    assert (said[-1], stops.returncode) == ("stopped (exit code 143)", 0)
    far.outcome.unlink()
    assert main(["stop", str(far.path)]) == 3  # nobody reacts
    assert "elsewhere does not react" in capsys.readouterr().err
    assert asked_by_file(far) == 2


def test_outcome_before_a_restart_is_not_the_end(far: RunDir) -> None:
    far.outcome.write_text(json.dumps({"status": "failed", "exit_code": 4, "attempt": 1, "started": "2026-01-01"}))
    assert find_state(far).name == "failed"
    append_json(far.events, {"time": time.time(), "event": "restart", "number": 1, "of": 2})
    assert find_state(far).name == "unknown"


def test_killed_supervisor_of_far_ranks_says_what_it_cannot_see(far: RunDir) -> None:
    write_supervisor(far, "gone")
    data = json.loads((far.path / "supervisor.json").read_text())
    (far.path / "supervisor.json").write_text(json.dumps({**data, "start": 1}))
    plan = json.loads(far.plan.read_text())
    plan["config"]["cluster"]["stop_grace_s"] = 20
    far.plan.write_text(json.dumps(plan))
    state = find_state(far)
    assert (state.name, state.text) == (
        "ending",
        "its launching process is gone; what runs on n1, n2 cannot be seen from here, and ends by itself within 140 s",
    )
    for path in [*far.path.rglob("*.json*")]:
        os.utime(path, (1e9, 1e9))
    state = find_state(far)
    assert state.name == "lost"
    assert state.text.endswith("what runs on n1, n2 cannot be seen from here, and has ended unless that host is stuck")
