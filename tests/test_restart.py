"""When a failed run is started again; who is told how it ended; what a detached run says."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.estimates import CONTEXT, FRAGMENTS
from launcher.planning.gpus import GIB
from launcher.rundir import RunDir, write_json
from launcher.running import causes
from launcher.running.failures import Failure
from launcher.running.folder import claim, write_files
from launcher.running.journal import JsonTail
from launcher.running.notify import notify
from launcher.running.restart import (
    Attempt,
    Relief,
    Restart,
    decide,
    find_relief,
    next_plan,
    note_restart,
    relief_text,
    restarts_of,
    summary,
)
from launcher.running.supervisor import ask_by_file, asked_by_file, write_supervisor
from launcher.running.verdict import Verdict
from launcher.spec import LossConfig
from launcher.training.losses import loss_of
from launcher.training.outofmemory import Seen, explain
from tests.planning_support import plan
from tests.running_support import wait_until


def attempt(cause: str | None, step: int, before: int | None, after: int | None) -> Attempt:
    """A start that failed for `cause` after `step`, with these newest checkpoints before and after it."""
    folders = [None if saved is None else Path(f"step-{saved:06}") for saved in (before, after)]
    if cause is None:
        return Attempt(verdict=Verdict(status="stopped", exit_code=130), step=step, before=folders[0], after=folders[1])
    failure = Failure(host="n2", rank=3, time=0.0, log="", cause=causes.CAUSES[cause], text="rank 3 on n2 died")
    verdict = Verdict(status="failed", exit_code=4, failures=(failure,))
    return Attempt(verdict=verdict, step=step, before=folders[0], after=folders[1])


@pytest.mark.parametrize("cause", ["host_memory", "lost_host", "network", "hang", "gpu_memory", "exception", "aborted"])
def test_what_may_go_well_next_time_is_started_again_from_the_last_checkpoint(cause: str) -> None:
    again = decide([attempt(cause, 250, None, 200)], most=2)
    assert again == Restart(number=1, wait_s=5.0, checkpoint=Path("step-000200"), why="rank 3 on n2 died")


@pytest.mark.parametrize(
    "cause", ["config", "machine", "import_error", "disk_full", "diverged", "left_early", "not_executable"]
)
def test_what_would_happen_again_is_not(cause: str) -> None:
    assert "the same would happen again" in str(decide([attempt(cause, 250, None, 200)], most=2))


def test_each_start_must_save_a_checkpoint() -> None:
    assert decide([attempt("lost_host", 150, None, None)], most=2) == "no checkpoint was saved since the last start"
    past = [attempt("lost_host", 250, None, 200), attempt("host_memory", 290, 200, 200)]
    assert decide(past, most=5) == "no checkpoint was saved since the last start"
    assert summary(past, 5, str(decide(past, 5))) == (
        "restarted 1 of 5 times, not again: no checkpoint was saved since the last start"
    )


def test_restarts_are_counted_and_wait_longer_each_time() -> None:
    past = []
    for number, wait_s in ((1, 5.0), (2, 15.0), (3, 45.0), (4, 45.0)):
        past.append(attempt("lost_host", 100 * number, 100 * (number - 1), 100 * number))
        again = decide(past, most=4)
        assert isinstance(again, Restart)
        assert (again.number, again.wait_s) == (number, wait_s)
    past.append(attempt("lost_host", 600, 400, 500))
    assert decide(past, most=4) == "restart.max=4 is reached"


def test_the_same_failure_at_the_same_step_is_not_tried_a_third_time() -> None:
    past = [attempt("gpu_memory", 612, 500, 600), attempt("gpu_memory", 612, 600, 610)]
    assert "failed in the same way, also after step 612" in str(decide(past, most=5))
    assert isinstance(decide([past[0], attempt("lost_host", 612, 600, 610)], most=5), Restart)


def test_nothing_is_said_where_nobody_asked_for_restarts() -> None:
    assert decide([attempt("lost_host", 250, None, 200)], most=0) == ""
    assert decide([attempt(None, 250, None, 200)], most=2) == ""  # stopped by a person
    assert summary([attempt("lost_host", 250, None, 200)], 0, "") == ""
    done = [attempt("lost_host", 250, None, 200), attempt(None, 500, 200, 400)]
    assert summary(done, 2, "") == "restarted 1 of 2 times"


def test_the_next_start_has_the_folder_and_a_run_id_of_its_own(tmp_path: Path) -> None:
    first = dataclasses.replace(plan(), run_dir=str(tmp_path / "run"), master_port=29500)
    again = decide([attempt("lost_host", 250, None, 200)], most=2)
    assert isinstance(again, Restart)
    with claim(first) as folder:
        write_files(folder.run, first, config_yaml="", overrides=[])
        write_json(folder.run.outcome, {"status": "failed"})
        note_restart(folder.run, again, 2)
        ask_by_file(folder.run)
        second = next_plan(first, again, 29600)
        folder.go_on(second)
        write_files(folder.run, second, config_yaml="", overrides=[])
        assert asked_by_file(folder.run) == 1  # meant for this process still
    run = RunDir(tmp_path / "run")
    assert (second.resume_from, second.run_id) == ("step-000200", f"{first.run_id}.1")
    assert (restarts_of(first.run_id), restarts_of(second.run_id)) == (0, 1)
    command = second.commands[first.hosts[0].name]
    assert command[command.index("--master_port") + 1] == "29600"
    assert json.loads((run.path / "plan.1.json").read_text())["run_id"] == first.run_id
    assert json.loads((run.path / "outcome.1.json").read_text()) == {"status": "failed"}
    assert not run.outcome.exists()
    (event,) = JsonTail(run.events).read()
    told = {key: event[key] for key in ("event", "number", "of", "path", "why")}
    assert told == {"event": "restart", "number": 1, "of": 2, "path": "step-000200", "why": "rank 3 on n2 died"}


def test_a_request_by_file_is_for_one_supervisor(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert asked_by_file(run) == 0
    assert [ask_by_file(run), ask_by_file(run), asked_by_file(run)] == [1, 2, 2]
    write_supervisor(run, "a")  # another part of the run begins
    assert asked_by_file(run) == 0


@pytest.fixture
def ended(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    write_json(run.outcome, {"status": "failed", "exit_code": 75})
    return run


def script(folder: Path, text: str) -> str:
    path = folder / "tell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_command_gets_the_outcome_and_its_words_as_they_are(ended: RunDir) -> None:
    told = ended.path / "told"
    command = [script(ended.path, f'cat > {told}; echo "$LAUNCHER_RUN_DIR|$1" >> {told}'), "a b;$HOME"]
    assert notify(command, ended) == []
    assert told.read_text() == f"{ended.outcome.read_text()}{ended.path}|a b;$HOME\n"
    assert notify([], ended) == []


def test_command_that_fails_is_one_line(ended: RunDir) -> None:
    command = [script(ended.path, "echo first; echo no such channel >&2; exit 3")]
    assert notify(command, ended) == ["warning: notify.command: it left with 3: no such channel"]
    (said,) = notify(["/nowhere/tell"], ended)
    assert "No such file or directory: '/nowhere/tell'" in said


def test_command_that_hangs_is_killed_with_its_children(ended: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.running.notify.PATIENCE_S", 0.5)
    child = ended.path / "child"
    command = [script(ended.path, f"sleep 60 & echo $! > {child}; wait")]
    assert notify(command, ended) == ["warning: notify.command: not through after 0 s, and killed"]
    wait_until(lambda: not Path("/proc", child.read_text().strip(), "exe").exists(), 5, "the child is gone")
    assert notify(command, ended, give_up=child.exists) == ["warning: notify.command: ended before it was through"]


def test_what_a_command_leaves_behind_is_not_waited_for(ended: RunDir) -> None:
    begun = time.monotonic()
    assert notify([script(ended.path, "sleep 20 & exit 0")], ended) == []
    assert time.monotonic() - begun < 5


# What `--detached-job` runs, without planning: says what it is told, starts, and goes on for a while.
JOB = """
import json, sys, time
from pathlib import Path
from launcher.running.detach import leaver
from launcher.rundir import RunDir
order = json.load(sys.stdin)
print("planned", *order["words"], flush=True)
print("a warning", file=sys.stderr, flush=True)
if "refused" in order["words"]:
    sys.exit(2)
run = RunDir(Path(sys.argv[1]))
run.path.mkdir()
if "slow" in order["words"]:
    time.sleep(60)
leaver(order)(run)
print("trains", flush=True)
time.sleep(1.0)
print("done", file=sys.stderr, flush=True)
(run.path / "over").touch()
"""
START = """
import sys
from launcher.running.detach import start_detached
job, run, *words = sys.argv[1:]
sys.exit(start_detached(words, [sys.executable, "-c", job, run]))
"""


def start(run: Path, *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", START, JOB, str(run), *words]
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)


def test_detached_run_is_seen_to_start_and_goes_on_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    starter = start(run, "model=tiny", "a b")
    said, errors = starter.communicate(timeout=20)
    assert not (run / "over").exists()  # it goes on, and holds none of the pipes read here
    first, head, *verbs = said.splitlines()
    assert first == "planned model=tiny a b"
    assert head.startswith("detached: process ") and head.endswith(f"what it says is in {run}/launcher.log")
    assert [line.split() for line in verbs] == [
        ["follow", "python", "-m", "launcher", "logs", "-f", str(run)],
        ["status", "python", "-m", "launcher", "status", str(run)],
        ["stop", "python", "-m", "launcher", "stop", str(run)],
    ]
    assert (errors, starter.returncode) == ("a warning\n", 0)
    pid = int(head.split()[2])
    assert os.getsid(pid) == pid
    wait_until((run / "over").exists, 10, "the run is over")
    assert (run / "launcher.log").read_text() == "trains\ndone\n"


def test_detached_run_that_cannot_start_says_so_here(tmp_path: Path) -> None:
    starter = start(tmp_path / "run", "refused")
    assert starter.communicate(timeout=20) == ("planned refused\n", "a warning\n")
    assert starter.returncode == 2


def test_ctrl_c_before_the_start_ends_it(tmp_path: Path) -> None:
    starter = start(tmp_path / "run", "slow")
    wait_until((tmp_path / "run").exists, 20, "it is at work")
    starter.send_signal(signal.SIGINT)
    said, errors = starter.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors
    assert starter.returncode != 0
    assert "detached" not in said


# A GPU's memory ends


def short_of_memory(tokens: int | None) -> Verdict:
    """The verdict of a run whose rank 0 had too little GPU memory for a micro-batch of so many tokens."""
    error = {"type": "GpuMemoryError", "message": "CUDA out of memory", "exit_code": 4, "details": {"tokens": tokens}}
    cause = causes.of_error("GpuMemoryError", "CUDA out of memory", 4)
    failure = Failure(host="n1", rank=0, time=0.0, log="", cause=cause, error=error)
    return Verdict(status="failed", exit_code=4, failures=(failure,))


def test_too_little_gpu_memory_is_met_with_smaller_micro_batches_then_with_recomputing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.data, {"train": {"lengths": {"longest": {"tokens": 5000}}}})
    first = dataclasses.replace(plan(), checkpointed_layers=0)
    first = dataclasses.replace(first, batch=dataclasses.replace(first.batch, max_tokens=16384))
    layers = first.arch["text_config"]["num_hidden_layers"]
    assert first.config.dataset.max_length == 4096
    assert find_relief(first, short_of_memory(10833), run) == Relief(max_tokens=8064, checkpointed_layers=0)
    # One prompt fits into 4,096 tokens; less would leave rows out, and the loss would be another one.
    assert find_relief(first, short_of_memory(5200), run) == Relief(max_tokens=16384, checkpointed_layers=layers)
    whole = dataclasses.replace(first, config=dataclasses.replace(first.config, loss=LossConfig(name="listwise")))
    assert find_relief(whole, short_of_memory(6600), run) == Relief(max_tokens=16384, checkpointed_layers=layers)
    spent = dataclasses.replace(whole, checkpointed_layers=layers)
    assert "cannot be smaller" in str(find_relief(spent, short_of_memory(6600), run))
    assert "before the first micro-batch" in str(find_relief(first, short_of_memory(None), run))
    assert find_relief(first, attempt("network", 1, None, None).verdict, run) is None


def test_a_start_with_smaller_micro_batches_needs_no_checkpoint() -> None:
    less = Relief(max_tokens=8064, checkpointed_layers=3)
    failed = dataclasses.replace(attempt("gpu_memory", 0, None, None), relief=less)
    again = decide([failed], most=1)
    assert again == Restart(number=1, wait_s=1.0, checkpoint=None, why="rank 3 on n2 died", relief=less)
    assert decide([failed, failed], most=1) == "restart.max=1 is reached"
    assert decide([dataclasses.replace(failed, relief="nothing helps")], most=1) == "nothing helps"
    started = dataclasses.replace(plan(), resume_from="/before/checkpoints/step-000010")
    second = next_plan(started, again, 29600)
    assert (second.batch.max_tokens, second.checkpointed_layers) == (8064, 3)
    assert second.resume_from == started.resume_from  # what the first start went on from
    assert "micro-batches of 8,064 tokens and 3 layers recomputed" in relief_text(less)


@pytest.mark.parametrize(
    "loss",
    [
        *({"name": name} for name in ("pointwise", "listwise")),
        *({"name": "pairwise", "form": form} for form in ("ranknet", "margin")),
        *({"name": "distill", "form": form} for form in ("margin_mse", "kl")),
        *({"name": "custom", "function": "math:fsum", "unit": unit} for unit in ("document", "group")),
    ],
)
def test_plan_and_training_agree_on_groups_that_stay_whole(loss: dict[str, str]) -> None:
    config = dataclasses.replace(plan().config, loss=LossConfig(**loss))
    assert config.whole_groups == loss_of(config).whole_groups


def test_the_part_that_was_underestimated_is_named() -> None:
    """80 GiB are planned for a GPU on which weights came out as planned and the micro-batch larger."""
    planned = {"frozen weights": 16, "gradients": 1, "activations": 30, CONTEXT: 2, FRAGMENTS: 1}
    tight = dataclasses.replace(plan(), memory={part: size * GIB for part, size in planned.items()})
    seen = {"states": 17, "peak": 60, "reserved": 62, "free": 1, "total": 80, "asked": 2}
    error = explain(tight, "micro-batch 2 of a step", 10833, Seen(**{name: size * GIB for name, size in seen.items()}))
    assert error.details == {
        "tokens": 10833,
        "part": "what grows with the tokens of a micro-batch",
        "planned_bytes": 30 * GIB,
        "seen_bytes": 45 * GIB,
    }
    for words in (
        "CUDA out of memory in micro-batch 2 of a step of 10,833 tokens",
        "weights, optimizer and the like: 17.0 GiB planned, 17.0 GiB here",
        "the CUDA context and other processes: 2.0 GiB planned, 17.0 GiB here",
        "restart.max=2",
    ):
        assert words in error.render()
    autos = dataclasses.replace(
        tight.config,
        zero=dataclasses.replace(tight.config.zero, name="auto"),
        batch=dataclasses.replace(tight.config.batch, max_tokens="auto"),
    )
    full = dataclasses.replace(tight, config=autos, checkpointed_layers=tight.arch["text_config"]["num_hidden_layers"])
    again = explain(full, "micro-batch 2 of a step", 10833, Seen(**{name: size * GIB for name, size in seen.items()}))
    assert again.problems[0].tries[0].startswith("batch.max_tokens=")
    assert again.problems[0].tries[1].startswith("memory.headroom=0.15 ")  # all else is as advised already
    assert causes.of_error("GpuMemoryError", str(error), 4).name == "gpu_memory"
    early = explain(
        tight, "loading the model", 0, Seen(**{n: s * GIB for n, s in seen.items() if n != "states"}, states=None)
    )
    assert early.details["part"] == "weights, optimizer and the like"
    assert "batch.max_tokens=" not in early.render().split("zero=auto")[0]
