"""Sweeps: words -> jobs as Hydra has them, what is refused before anything starts, and jobs that end in every way."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.__main__ import main
from launcher.errors import ConfigError
from launcher.planning import grammar
from launcher.planning.sweeps import MAX_JOBS, expand, read_jobs
from launcher.rundir import RunDir
from launcher.running.agent import find_run, is_alive, read_process
from launcher.running.journal import last_step
from launcher.running.results import read_numbers, result_table
from launcher.running.state import current_job, find_folder, find_state, list_runs, run_name
from launcher.running.stops import StopSignals
from launcher.running.supervisor import read_supervisor
from launcher.running.sweep import Sweep, run_sweep
from launcher.running.sweep_plan import plan_sweep
from tests.digit_rows import write_digits
from tests.running_support import PROCESSES, command_of, wait_until

JOB = [sys.executable, str(PROCESSES / "sweep_job.py")]
SWEEP = """import sys
from launcher.running.sweep import run_sweep
sys.exit(run_sweep(sys.argv[2:], [sys.executable, sys.argv[1]]))"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test stands in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(text: str) -> list[str]:
    """The words of each job of a command line."""
    return [" ".join(job.words) for job in expand(shlex.split(text))]


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_jobs(shlex.split(text))
    return str(caught.value)


# Words -> jobs.

AS_HYDRA = [
    "zero=stage2,stage3 optim.lr=1e-3,3e-3",
    "optim.lr=1e-3,3e-3 zero=stage2,stage3 train.seed=7",
    "train.seed=choice(3,1,2) zero=stage3",
    "train.seed=range(1,5) train.epochs=range(0.5,2.0,0.5)",
    "train.seed=range(5,1,-2)",
    "train.seed=sort(3,1,2) optim.lr='sort(0.3,0.1,reverse=true)'",
    "train.seed='tag(a,b,choice(1,2))'",
    "zero='sort(choice(stage3,stage2))'",
    "gpus=[0],[1,2] optim.betas=[0.9,0.95],[0.9,0.999]",
    '\'task.instruction="a, b","c"\' \'env.set.X="a,b"\' env.set.Y=a,b',
    "train.max_steps=null,3 eval.at_start=true,false",
    "model.arch.text_config={a:1},{a:2,b:[1,2]}",
    "+zero=stage2,stage3",
    "experiment=null,digits",
]


@pytest.mark.parametrize("text", AS_HYDRA)
def test_jobs_are_those_of_hydras_own_sweeper(text: str) -> None:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = [word.lstrip("+") for word in shlex.split(text)]
    theirs = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)[0]
    ours = [job.words for job in expand(["-m", *shlex.split(text)])]
    assert [[_meant(word) for word in job] for job in ours] == [[_meant(word) for word in job] for job in theirs]
    assert len(theirs) > 1


def _meant(word: str) -> tuple[str, grammar.Parsed]:
    key, _, raw = word.lstrip("+").partition("=")
    return key, grammar.parse(raw)


def test_shuffle_gives_each_value_once() -> None:
    assert sorted(lines("-m train.seed=shuffle(range(1,9))")) == [f"train.seed={n}" for n in range(1, 9)]


def test_values_stay_as_they_are_typed() -> None:
    assert lines("optim.lr=1e-3,3e-3 -m env.set.X=08,1e-3") == [
        "optim.lr=1e-3 env.set.X=08",
        "optim.lr=1e-3 env.set.X=1e-3",
        "optim.lr=3e-3 env.set.X=08",
        "optim.lr=3e-3 env.set.X=1e-3",
    ]


def test_glob_takes_options_of_a_group() -> None:
    assert lines("--multirun 'zero=glob(stage?,exclude=[*0,*1])'") == ["zero=stage2", "zero=stage3"]
    assert "no option fits" in refused("-m zero=glob(x*)")


def test_one_value_is_one_job() -> None:
    assert lines("-m zero=stage3 optim.lr=1e-3") == ["zero=stage3 optim.lr=1e-3"]
    assert [job.differs for job in expand(["-m"])] == [()]


def test_what_differs_masks_secrets() -> None:
    jobs = expand(["-m", "env.set.HF_TOKEN=abc,def", "env.set={WANDB_API_KEY:abc},{A:1}", "train.seed=1"])
    assert jobs[0].differs == (("env.set.HF_TOKEN", "***"), ("env.set", "***"))
    assert jobs[1].differs[1] == ("env.set", "{A:1}")
    assert jobs[0].words[0] == "env.set.HF_TOKEN=abc"


def test_every_job_has_a_configuration_of_its_own() -> None:
    """X02, and D16 of the keys above a DeepSpeed file."""
    read = read_jobs(["-m", "zero=stage2,stage3", "env.set={A:1}", "env.set.B=x,y", "sweep.metric=loss"])
    configs = [read.composed[number].config for number in range(4)]
    assert [(config.zero.name, config.env.set) for config in configs] == [
        (zero, {"A": "1", "B": b}) for zero in ("stage2", "stage3") for b in ("x", "y")
    ]
    assert len({id(config.env.set) for config in configs}) == 4
    assert (read.metric, read.options.fail_fast) == ("loss", False)


def test_too_many_jobs_are_counted() -> None:
    text = refused("-m train.seed=range(0,40) optim.warmup_steps=range(0,40) zero=stage3")
    assert f"1,600 jobs (train.seed has 40 x optim.warmup_steps has 40); a sweep has at most {MAX_JOBS:,}" in text
    assert "at least 100,000 jobs" in refused("-m train.seed=range(0,1000000000)")


def test_each_problem_of_all_jobs_is_said_once(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    words = ["zero=stage2,stge3", "optim.lr=1e-3,-1,0.001", "tune=lora,full", "modle=x"]
    assert main(["-m", *words]) == 2
    shown = capsys.readouterr()
    assert "3 problems with this sweep of 12 jobs:\n" in shown.err
    for part in (
        "  modle=x: there is no key modle\n",  # of all jobs
        "  jobs 2, 3, 8, 9 (optim.lr=-1): optim.lr=-1: must be above 0\n",
        "  jobs 6, 7, 8, 9, 10, 11 (zero=stge3): zero=stge3: no such option",
    ):
        assert part in shown.err
    assert main(["-m", "plan", *words[:2], "sweep.skip_invalid=true"]) == 2
    shown = capsys.readouterr()
    assert "problem" not in shown.err
    assert "job 2 (zero=stage2 optim.lr=0.001): the same run as job 0 (zero=stage2 optim.lr=1e-3)" in shown.out
    assert not any(elsewhere.iterdir())


def test_plan_shows_every_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "zero=stage2,stage3", "-m", "train.max_steps=2,3", "gpus=1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["job", "zero", "train.max_steps", "ranks", "steps", "GiB"]
    assert [row[:5] for row in rows[2:6]] == [
        [str(n), zero, steps, "1", steps]
        for n, (zero, steps) in enumerate([("stage2", "2"), ("stage2", "3"), ("stage3", "2"), ("stage3", "3")])
    ]
    assert main(["plan", "-m", "train.seed=1,2", "--json", "env.set.HF_TOKEN=abc"]) == 0
    shown = capsys.readouterr().out
    assert [job["plan"]["config"]["train"]["seed"] for job in json.loads(shown)["jobs"]] == [1, 2]
    assert "abc" not in shown


def test_what_is_about_the_whole_sweep_is_the_same_in_all_jobs(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    for name, keys in (("one", "run:\n  name: one"), ("two", "sweep:\n  fail_fast: true")):
        (tmp_path / "conf" / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{keys}\n")
    text = refused("-m --config-dir conf model=tiny experiment=one,two")
    assert "run.name is one and null in different jobs" in text
    assert "sweep.fail_fast is false and true in different jobs" in text
    assert plan_sweep(["-m", "train.seed=1,2", "run.name=mine"]).folder == tmp_path / "runs" / "mine"
    assert plan_sweep(["-m", "train.seed=1,2", "run.dir=here"]).plans[1].run_dir == str(tmp_path / "here" / "1")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "file").touch()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        plan_sweep(["-m", "train.seed=1,2", "run.name=mine"])


# Jobs that end in every way; the stand-in job is the real thing here: a process that does what it likes.


def sweep(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and sweep.json of a sweep of stand-in jobs, named s."""
    code = run_sweep(["-m", "run.name=s", *words], JOB)
    return code, json.loads(Path("runs/s/sweep.json").read_text())


def statuses(data: dict[str, Any]) -> list[str]:
    return [job["status"] for job in data["jobs"]]


def test_every_job_runs_whatever_became_of_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    """sys.exit with and without a code, a death by signal, an orphan: as Y14 and X02 have it."""
    code, data = sweep("env.set.DEED=3,0,kill,orphan,done", "train.seed=2", "cluster.stop_grace_s=0.5")
    assert code == 4
    assert statuses(data) == ["failed"] * 4 + ["done"]
    assert [job["exit_code"] for job in data["jobs"]] == [3, 0, -9, -9, 0]
    assert (data["status"], data["exit_code"], data["metric"]) == ("failed", 4, "ndcg@10")
    shown = capfd.readouterr().out
    assert shown.count("deed ") == 5  # what jobs print arrives
    assert "job 4  env.set.DEED=done  done  ndcg@10 0.5000  loss 2.0000 (last tenth)  200 tokens/s  2.0" in shown
    assert "  best    runs/s/4   (ndcg@10 0.5000)\n" in shown
    assert "exit code 0, but it left no outcome" in shown
    assert "1 processes of this job outlive it" in shown and "they are killed" in shown
    orphan = int(Path("runs/s/3/orphan").read_text())
    assert read_process(orphan) is None or read_process(orphan).ended  # type: ignore[union-attr]
    table = Path("runs/s/table.txt").read_text().splitlines()
    assert [row.split()[0] for row in table] == ["job", "4", "0", "1", "2", "3"]  # failed ones last
    assert "killed by SIGKILL" in table[-1]


def test_words_and_environment_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y20, X02."""
    monkeypatch.setenv("MINE", "kept")
    code, data = sweep("train.seed=1,2", "env.set.HF_TOKEN=hf_abc", "sweep.metric=loss", "cluster.master_port=29517")
    assert (code, data["status"]) == (0, "done")
    for number in range(2):
        argv, words, environment = json.loads(Path(f"runs/s/{number}/environment.json").read_text())
        assert "hf_abc" not in str(argv)
        folder = Path.cwd() / "runs" / "s" / str(number)
        wanted = [f"train.seed={number + 1}", "env.set.HF_TOKEN=hf_abc", "cluster.master_port=29517"]
        assert words == [*wanted, f"run.dir={grammar.as_typed(str(folder))}"]
        assert environment["MINE"] == "kept" and "MASTER_PORT" not in environment
    assert "hf_abc" not in Path("runs/s/sweep.json").read_text()


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["env.set.DEED=2,done"], 2, ["failed", "done"]),  # the common exit code of those that failed
        (["env.set.DEED=3,4"], 4, ["failed", "failed"]),
        (["env.set.DEED=odd,done"], 4, ["failed", "done"]),  # numbers that cannot be added up
        (["env.set.DEED=signal40,done"], 4, ["failed", "done"]),  # a signal without a name
        (["env.set.DEED=3,done", "sweep.fail_fast=true"], 3, ["failed", "not started"]),
        (["train.seed=-1,1", "sweep.skip_invalid=true"], 2, ["invalid", "done"]),
    ],
)
def test_exit_code_tells_who_must_act(words: list[str], code: int, expected: list[str]) -> None:
    given, data = sweep(*words, *([] if "seed" in words[0] else ["train.seed=1"]))
    assert (given, statuses(data)) == (code, expected)
    assert data["exit_code"] == code


def test_two_sweeps_of_one_second_have_a_folder_each() -> None:
    """Y16."""
    planned = plan_sweep(["-m", "train.seed=1"])
    with StopSignals() as stop:
        sweeps = [Sweep(planned, JOB, stop, sys.stdout) for _ in range(2)]
        assert [one.run() for one in sweeps] == [0, 0]
    assert [one.folder.path.name for one in sweeps] == [planned.folder.name, f"{planned.folder.name}-2"]
    named = plan_sweep(["-m", "train.seed=1", "run.name=s"])
    with StopSignals() as stop:
        Sweep(named, JOB, stop, sys.stdout)
        with pytest.raises(ConfigError, match="was taken by another start"):
            Sweep(named, JOB, stop, sys.stdout)


# Sweeps as processes: stopped, killed, looked at.


class Started:
    """A sweep of stand-in jobs at work."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-c", SWEEP, JOB[1], "-m", "run.name=s", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def ready(self, number: int = 0) -> int:
        """Wait until a job hangs; its pid."""
        folder = Path("runs/s") / str(number)
        wait_until((folder / "ready").exists, 20, "the job hangs")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def end(self) -> tuple[int, list[str], str]:
        text, _ = self.process.communicate(timeout=20)
        return self.process.returncode, statuses(json.loads(Path("runs/s/sweep.json").read_text())), text


@pytest.fixture
def started() -> Iterator[Callable[..., Started]]:
    """Starts sweeps, and leaves none behind."""
    all_: list[Started] = []

    def start(*words: str) -> Started:
        all_.append(Started(*words))
        return all_[-1]

    yield start
    for one in all_:
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_reaches_the_job_once_and_starts_no_other(
    started: Callable[..., Started], number: signal.Signals, code: int
) -> None:
    one = started("env.set.DEED=hang,done", "train.seed=1")
    one.ready()
    one.process.send_signal(number)
    given, found, text = one.end()
    assert (given, found) == (code, ["stopped", "not started"])
    assert Path("runs/s/0/signals").read_text() == f"{int(number)}\n"
    assert "after step 3" in text and "0 of 2 jobs are done" in text


def test_a_second_stop_is_passed_on(started: Callable[..., Started]) -> None:
    one = started("env.set.DEED=deaf,done", "train.seed=1")
    one.ready()
    for count in (1, 2):
        one.process.send_signal(signal.SIGINT)
        wait_until(lambda: Path("runs/s/0/signals").exists(), 5, "the signal arrives")
        wait_until(lambda c=count: Path("runs/s/0/signals").read_text().count("\n") == c, 5, "each arrives")
    assert one.end()[:2] == (130, ["stopped", "not started"])


def test_a_killed_sweep_takes_its_job_along(
    started: Callable[..., Started], capsys: pytest.CaptureFixture[str]
) -> None:
    one = started("env.set.DEED=hang,done", "train.seed=1")
    job = read_process(one.ready())
    assert job is not None
    assert find_state(RunDir(Path("runs/s"))).name == "running"
    one.process.kill()
    wait_until(lambda: not is_alive(job.pid, job.start), 10, "the job ends")
    assert Path("runs/s/0/signals").read_text() == f"{int(signal.SIGTERM)}\n"  # it could save
    assert find_state(RunDir(Path("runs/s"))).name == "lost"
    assert main(["status", "s"]) == 0
    assert "its process was killed" in capsys.readouterr().out


def test_a_sweep_is_shown_followed_and_stopped_like_a_run(
    started: Callable[..., Started], capsys: pytest.CaptureFixture[str]
) -> None:
    one = started("env.set.DEED=done,hang,2", "train.seed=1")
    one.ready(1)
    assert main(["status"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["s", "running", "1/3", "jobs", "-", "-"] in rows
    assert ["s/0", "done", "1/1", "1.0000", "ndcg@10", "1.0000"] in rows
    assert main(["status", "s"]) == 0
    shown = capsys.readouterr().out
    assert f"running, 1 of 3 jobs over, led by process {one.process.pid}" in shown
    assert [line.split()[2] for line in shown.splitlines()[4:]] == ["done", "running", "waiting"]
    assert main(["stop", "s"]) == 0
    assert "stopped (exit code 143): 1 of 3 jobs done" in capsys.readouterr().out
    assert one.end()[:2] == (143, ["done", "stopped", "not started"])
    assert main(["resume", "s"]) == 2
    assert "python -m launcher resume" in capsys.readouterr().err


def test_runs_inside_sweeps_are_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, name in enumerate(("alone", "s/1", "s/0")):
        (runs / name).mkdir(parents=True)
        (runs / name / "plan.json").write_text("{}")
        os.utime(runs / name / "plan.json", (1e9 - age, 1e9 - age))
    (runs / "s" / "sweep.json").write_text(json.dumps({"jobs": [{"folder": "0"}, {"folder": "1"}, {"folder": "2"}]}))
    assert [run_name(run) for run in list_runs(str(runs))] == ["alone", "s/1", "s/0"]
    assert find_folder("s/0", str(runs)) == RunDir(runs / "s" / "0")
    assert find_folder("s", str(runs)) == RunDir(runs / "s")
    assert current_job(RunDir(runs / "s")) == RunDir(runs / "s" / "1")
    (runs / "s" / "1" / "logs").mkdir()
    (runs / "s" / "1" / "logs" / "localhost.0.log").write_text("a line of job 1\n")
    assert main(["logs", "s", "--root", str(runs)]) == 0
    assert capsys.readouterr().out == "a line of job 1\n"


def test_the_table_is_sorted_by_its_metric(tmp_path: Path) -> None:
    def job(number: int, status: str = "done", **numbers: float | None) -> dict[str, Any]:
        known = {"number": number, "status": status, "reason": "", "seconds": 3661.4, "folder": str(number)}
        return {**known, "differs": {"optim.lr": f"1e-{number}"}, "numbers": numbers}

    jobs = [job(0, loss=2.0, tokens_per_s=10.0), job(1, loss=None), job(2, "failed"), job(3, loss=1.0, tokens_per_s=5)]
    for metric, order in (("loss", "3012"), ("tokens_per_s", "0312"), ("mrr@10", "0132")):
        table = result_table({"metric": metric, "jobs": jobs}, RunDir(tmp_path))
        assert "".join(row.split()[0] for row in table[1:]) == order
    head = "job  optim.lr  status  mrr@10  loss, last tenth  tokens/s  queries/s  GiB  time"
    assert " ".join(table[0].split()) == " ".join(head.split())
    assert table[1].split() == ["0", "1e-0", "done", "-", "2.0000", "10", "-", "-", "1:01:01"]


def test_numbers_of_a_job_that_never_trained_are_unknown(tmp_path: Path) -> None:
    assert read_numbers(RunDir(tmp_path), "ndcg@10") == {}
    (tmp_path / "plan.json").write_text("{}")
    assert set(read_numbers(RunDir(tmp_path), "ndcg@10").values()) == {None}


# Real training jobs.

SMALL = ["gpus=1", "batch.global_size=4", "checkpoint.export=false"]
SMALL += ["eval.at_start=false", "eval.every_steps=null"]


def test_real_jobs_follow_each_other_when_one_is_killed(tmp_path: Path) -> None:
    """Y25: the launching process of the first dies while it trains; the second has its port, and nothing else of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["train.max_steps=500,2", f"cluster.master_port={port}", "env.set.HF_TOKEN=hf_hidden", "run.name=s", *SMALL]
    words += write_digits(tmp_path / "rows", 24)
    secret = tmp_path / "words.py"  # so that this test's own command line does not show it
    secret.write_text(f"from launcher.__main__ import main; import sys; sys.exit(main(['-m', *{words!r}]))")
    log = tmp_path / "log"
    with open(log, "w") as file:
        sweep = subprocess.Popen([sys.executable, str(secret)], stdout=file, stderr=subprocess.STDOUT)
    try:
        first = RunDir(tmp_path / "runs" / "s" / "0")
        wait_until(lambda: last_step(first) is not None or sweep.poll() is not None, 120, "a step")
        assert sweep.poll() is None, log.read_text()
        commands = [command_of(path.name) for path in Path("/proc").glob("[0-9]*")]
        assert any(b"--job-of-a-sweep" in command for command in commands)
        assert not any(b"hf_hidden" in command for command in commands)
        supervisor = read_supervisor(first)
        assert supervisor is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        assert sweep.wait(timeout=180) == 4, log.read_text()
    finally:
        sweep.terminate()
        sweep.wait(timeout=60)
    data = json.loads((tmp_path / "runs" / "s" / "sweep.json").read_text())
    assert statuses(data) == ["failed", "done"]
    assert find_run(supervisor.run_id) == []
    assert data["jobs"][1]["numbers"]["ndcg@10"] > 0
    shown = log.read_text()
    assert "processes of this job outlive it" in shown
    assert shown.index("outlive") < shown.index("job 1   train.max_steps=2")
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("  job ")] == ["train.max_steps"]
    found = [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and b"hf_hidden" in path.read_bytes()]
    assert found == []
    assert (tmp_path / "runs" / "s" / "report.html").exists()
