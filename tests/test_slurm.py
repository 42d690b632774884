"""A real Slurm over two hosts: how srun is told to reach them, how a run is queued, stopped for time and goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.errors import MachineError
from launcher.planning.batch_script import batch_script, slurm_problems
from launcher.rundir import RunDir, complete_checkpoints, read_json, write_json
from launcher.running import watch
from launcher.running.slurm import srun_argv
from launcher.running.state import find_state
from launcher.spec import Host, RunConfig
from tests.cluster import await_that
from tests.planning_support import plan as plan_of
from tests.running_support import command_of
from tests.slurm import Slurm

REPO = Path(__file__).resolve().parent.parent
LIGHT = REPO / "tests" / "processes" / "light"
WORDS = (
    *("cluster.transport=slurm", "env.set.DS_ACCELERATOR=cpu", "gpus=1", "nodes=2", "checkpoint.export=false"),
    *("logging.monitor_every_s=null", "cluster.stop_grace_s=20", "cluster.sync=none"),
)


@pytest.fixture
def queue(slurm: Slurm) -> Iterator[Slurm]:
    yield slurm
    slurm.clear()


def launch(slurm: Slurm, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": f"{LIGHT}:{REPO}", **variables}
    return slurm.run([sys.executable, "-m", "launcher", *words], cwd=folder, env=env)


def job_of(run: RunDir) -> str:
    return str(read_json(run.slurm / "job.json")["job_id"])


def output(run: RunDir) -> str:
    path = run.slurm / "output.txt"
    return path.read_text() if path.exists() else ""


def await_end(slurm: Slurm, run: RunDir, within_s: float = 90) -> dict[str, str]:
    def over() -> bool:
        return slurm.job(job_of(run))["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")

    await_that(over, within_s, lambda: f"{slurm.job(job_of(run))}\n{output(run)}")
    return slurm.job(job_of(run))


def await_training(run: RunDir) -> None:
    """Wait until both ranks take steps; before that they are killed rather than asked to save."""

    def states() -> list[str]:
        return [str(read_json(run.rank(rank))["state"]) for rank in (0, 1) if run.rank(rank).exists()]

    await_that(lambda: states() == ["running"] * 2, 60, lambda: f"{states()}\n{output(run)}")


def steps(run: RunDir) -> list[int]:
    return [int(folder.name[5:]) for folder in complete_checkpoints(run)]


def test_srun_carries_every_byte_both_ways(queue: Slurm) -> None:
    echo = "import os\nwhile data := os.read(0, 65536):\n    while data: data = data[os.write(1, data):]"
    argv = ["salloc", "--quiet", "-N2", *srun_argv(Host(name="n2", gpus=(0,)), "cpu"), sys.executable, "-c", echo]
    every = bytes(range(256)) * 4096 + b"no line end"
    process = queue.popen(argv, env={"SLURM_LABELIO": "1"}, stdin=-1, stdout=-1, stderr=-1)
    out, errors = process.communicate(every, timeout=30)
    assert (process.returncode, errors) == (0, b"")
    assert out == every


def test_several_steps_share_a_host_and_each_has_one_task_on_it(queue: Slurm) -> None:
    say = 'import os, socket, time; print(socket.gethostname(), os.environ["SLURM_STEP_NUM_TASKS"]); time.sleep(1)'
    step = [*srun_argv(Host(name="n1", gpus=(0,)), "cpu"), sys.executable, "-c", say]
    both = f"import subprocess, sys; ps = [subprocess.Popen({step!r}) for _ in range(2)]; [p.wait(8) for p in ps]"
    # A job of two tasks a host on all its processors: without our options srun would start four, or wait.
    argv = ["salloc", "--quiet", "-N2", "--ntasks-per-node=2", "--cpus-per-task=2", sys.executable, "-c", both]
    assert queue.run(argv, check=True).stdout.split() == ["n1", "1", "n1", "1"]


def test_srun_tells_how_the_program_ended(queue: Slurm) -> None:
    argv = ["salloc", "--quiet", "-N2", *srun_argv(Host(name="n2", gpus=(0,)), "cpu"), sys.executable, "-c"]
    assert queue.run([*argv, "raise SystemExit(7)"]).returncode == 7


def test_the_script_of_a_plan() -> None:
    plan = plan_of("gpus=4", "nodes=2", "cluster.transport=slurm", "cluster.slurm_args=[--partition=gpu]", "run.dir=r")
    plan = dataclasses.replace(plan, run_dir="/data/a run")
    script = batch_script(plan, folder=Path("/data/a run/slurm"), cwd="/home/me/it's", python="/venv/bin/python")
    assert script.splitlines() == [
        "#!/bin/bash",
        "#SBATCH '--job-name=a run'",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=32",
        "#SBATCH '--output=/data/a run/slurm/output.txt'",
        "#SBATCH --open-mode=append",
        "#SBATCH --export=ALL",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR2@180",
        "#SBATCH --partition=gpu",
        "# Starts the run that job.json beside this file describes, or goes on from its last whole checkpoint.",
        "cd -- '/home/me/it'\"'\"'s' || exit 3",
        "exec /venv/bin/python -m launcher --slurm-job '/data/a run/slurm'",
    ]


@pytest.mark.parametrize(
    ("word", "gone"),
    [
        ("--gres=gpu:h100:4", "--gpus-per-node=4"),
        ("--gpus-per-node=h100:4", "--gpus-per-node=4"),
        ("--exclusive", "--cpus-per-task=32"),
        ("--job-name=mine", "--job-name=r"),
    ],
)
def test_what_was_typed_for_slurm_wins(word: str, gone: str) -> None:
    plan = plan_of("gpus=4", "nodes=2", "cluster.transport=slurm", f"cluster.slurm_args=[{word}]")
    script = batch_script(dataclasses.replace(plan, run_dir="/d/r"), folder=Path("/d/r/slurm"), cwd="/", python="/p")
    assert f"#SBATCH {word}\n" in script
    assert f"#SBATCH {gone}\n" not in script


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes=4"], "try  nodes=2"),
        (["--nod=4"], "try  nodes=2"),
        (["--gpus=8"], "try  gpus=8"),
        (["--gres=gpu:8"], "try  gpus=8"),
        (["--output=x"], "which the launcher sets itself"),
        (["--export=NONE"], "env.forward"),
        (["-p", "gpu"], "--NAME=VALUE"),
        (["partition=gpu"], "--NAME=VALUE"),
        (["--time=2"], "leaves no time to train"),
        (["--time=00:03:30"], "leaves no time to train"),
    ],
)
def test_what_slurm_args_cannot_say(words: list[str], said: str) -> None:
    config = config_with(words)
    assert said in "\n".join(problem.render() for problem in slurm_problems(config, 4))


@pytest.mark.parametrize("word", ["--time=4:01", "--time=1-0", "--time=UNLIMITED", "--gres=gpu:a100:4", "--mem=0"])
def test_what_slurm_args_can_say(word: str) -> None:
    assert not list(slurm_problems(config_with([word]), 4))


def config_with(words: list[str]) -> RunConfig:
    cluster = dataclasses.replace(RunConfig().cluster, slurm_args=words)
    return dataclasses.replace(RunConfig(), cluster=cluster)


def test_a_run_in_the_queue_stops_for_the_time_limit_waits_again_and_goes_on_to_its_end(
    queue: Slurm, tmp_path: Path
) -> None:
    odd = 'cluster.slurm_args=["--comment=$HOME \\"a\\" # %j"]'
    words = ("run.name=a %j 'run'", "train.max_steps=150", "checkpoint.every_steps=5", "env.set.MY_TOKEN=hush", odd)
    done = launch(queue, tmp_path, *WORDS, *words, WANDB_NOTES="a\nb $(id)", SBATCH_EXPORT="NONE", SBATCH_TIMELIMIT="9")
    assert (done.returncode, done.stderr) == (0, "")
    run = RunDir(tmp_path / "runs" / "a %j 'run'")
    job = job_of(run)
    assert f"Slurm job {job}: 2 hosts" in done.stdout
    shown = queue.run(["scontrol", "show", "job", job]).stdout
    assert 'Comment=$HOME "a" # %j' in shown
    assert "TimeLimit=00:09:00" in shown
    await_that(lambda: steps(run) != [], 60, lambda: output(run))
    queue.run(["scancel", "--signal=USR2", "--batch", job], check=True)  # as Slurm does when the time limit is near
    await_that(lambda: "waits in the queue again" in output(run), 60, lambda: output(run))
    assert "the job's time limit is near: finishing the step and saving" in output(run)
    assert "SIGTERM" not in output(run)
    waiting = verb(queue, tmp_path, "status", str(run.path))
    assert "state   waits in Slurm's queue again: Slurm job" in waiting and "resume" not in waiting
    ended = await_end(queue, run)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), output(run)
    told = re.search(r"waits in the queue again, to go on from step-0*(\d+)", output(run))
    assert told is not None, output(run)
    assert f"from step {told[1]}\n" in run.log("n2", 1).read_text()
    assert read_json(run.outcome)["status"] == "done"
    for rank in (0, 1):
        env = read_json(run.path / f"env.{rank}.json")
        assert (env["MY_TOKEN"], env["WANDB_NOTES"]) == ("hush", "a\nb $(id)")
    assert "LAUNCHER_SECRETS" not in env
    written = [path for path in run.path.rglob("*") if path.is_file() and not path.name.startswith("env.")]
    assert [path for path in written if b"hush" in path.read_bytes()] == []


def test_a_run_that_fails_is_not_started_again(queue: Slurm, tmp_path: Path) -> None:
    words = ("run.name=r", "train.max_steps=100", "env.set.DEED=1:raise", "checkpoint.every_steps=2")
    assert launch(queue, tmp_path, *WORDS, *words).returncode == 0
    run = RunDir(tmp_path / "runs" / "r")
    ended = await_end(queue, run)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "4:0", "0"), output(run)
    assert "rank 1 on n2 failed: ValueError: row 7" in output(run)


def verb(slurm: Slurm, folder: Path, *words: str) -> str:
    """What a verb says of the runs in a folder."""
    done = slurm.run([sys.executable, "-m", "launcher", *words], cwd=folder, env={"PYTHONPATH": f"{REPO}"})
    return f"{done.returncode} {done.stdout}{done.stderr}"


def test_a_run_that_waits_is_seen_and_taken_out_of_the_queue(queue: Slurm, tmp_path: Path) -> None:
    assert launch(queue, tmp_path, *WORDS, "run.name=r", "cluster.slurm_args=[--hold]").returncode == 0
    job = job_of(RunDir(tmp_path / "runs" / "r"))
    assert re.search("^r +queued", verb(queue, tmp_path, "status"), re.MULTILINE)
    text = f"waits in Slurm's queue: Slurm job {job}: PENDING (JobHeldUser)"
    assert f"state   {text}\n" in verb(queue, tmp_path, "status", "latest")
    assert text in verb(queue, tmp_path, "logs", "r")
    assert "was handed to Slurm and has not begun" in verb(queue, tmp_path, "report", "r")
    assert verb(queue, tmp_path, "stop", "r") == f"0 Slurm job {job} is cancelled: it waited in the queue\n"
    assert f"state   never started: its Slurm job {job} is gone" in verb(queue, tmp_path, "status", "r")
    assert verb(queue, tmp_path, "stop", "r").startswith("0 nothing to stop: never started")


def test_without_squeue_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "r")
    write_json(run.slurm / "job.json", {"job_id": "7"})
    monkeypatch.setenv("PATH", str(tmp_path))
    state = find_state(run)
    assert (state.name, state.text) == (
        "queued",
        "handed to Slurm as job 7; more cannot be told from here: this machine has no squeue",
    )
    with pytest.raises(MachineError, match="Slurm job 7 cannot be stopped from here: this machine has no squeue"):
        watch.main("stop", [str(run.path)])
    (run.slurm / "output.txt").write_text("no such partition\n")
    assert watch.main("logs", [str(run.path)]) == 0


def test_stop_reaches_a_job_from_another_machine(queue: Slurm, tmp_path: Path) -> None:
    assert launch(queue, tmp_path, *WORDS, "run.name=r", "train.max_steps=9999").returncode == 0
    run = RunDir(tmp_path / "runs" / "r")
    await_training(run)
    job = job_of(run)
    assert f"state   Slurm job {job}: RUNNING, supervised by process" in verb(queue, tmp_path, "status", "r")
    said = verb(queue, tmp_path, "stop", "r")
    assert said.startswith(f"0 asked Slurm job {job} to stop: it finishes the step and saves"), said
    assert "stopped (exit code 143)" in said and "resume  " in said
    assert len(steps(run)) == 1, output(run)


def test_scancel_stops_and_saves(queue: Slurm, tmp_path: Path) -> None:
    assert launch(queue, tmp_path, *WORDS, "run.name=r", "train.max_steps=9999").returncode == 0
    run = RunDir(tmp_path / "runs" / "r")
    await_training(run)
    queue.run(["scancel", job_of(run)], check=True)
    ended = await_end(queue, run)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), output(run)
    assert len(steps(run)) == 1, output(run)


def test_a_job_that_slurm_starts_again_without_a_checkpoint_begins_anew(queue: Slurm, tmp_path: Path) -> None:
    assert launch(queue, tmp_path, *WORDS, "run.name=r", "train.max_steps=60").returncode == 0
    run = RunDir(tmp_path / "runs" / "r")
    await_training(run)
    for host in queue.hosts:  # nobody saves: as if the power had gone
        for pid in host.pids():
            if b"launcher" in command_of(pid):
                with suppress(ProcessLookupError):  # one that died ends others
                    os.kill(pid, signal.SIGKILL)
    queue.run(["scontrol", "requeue", job_of(run)], check=True)
    ended = await_end(queue, run)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output(run)
    assert read_json(run.outcome)["status"] == "done"
    assert (run.slurm / "start-1" / "plan.json").exists()


@pytest.mark.parametrize(("option", "said"), [("--partition=no", "invalid partition"), ("--constraint=no", "feature")])
def test_what_slurm_refuses_leaves_nothing(queue: Slurm, tmp_path: Path, option: str, said: str) -> None:
    done = launch(queue, tmp_path, *WORDS, f"cluster.slurm_args=[{option}]")
    assert done.returncode == 2
    assert said in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_plan_shows_the_script(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "launcher", "plan", *WORDS, "run.name=r"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "#SBATCH --nodes=2" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_without_sbatch_the_machine_is_at_fault(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    argv = [sys.executable, "-m", "launcher", *WORDS]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 3
    assert "the PATH has none" in done.stderr


def test_the_words_of_a_job_are_kept_without_its_secrets(queue: Slurm, tmp_path: Path) -> None:
    words = ("cluster.slurm_args=[--hold]", "env.set.MY_TOKEN=hush", "run.name=r")
    assert launch(queue, tmp_path, *WORDS, *words).returncode == 0
    run = RunDir(tmp_path / "runs" / "r")
    job = json.loads((run.slurm / "job.json").read_text())
    assert f"run.dir={run.path}" in job["words"]
    assert not [word for word in job["words"] if "MY_TOKEN" in word]
    again = launch(queue, tmp_path, *WORDS, "run.name=r")
    assert again.returncode == 2
    assert "was handed to Slurm before" in again.stderr
