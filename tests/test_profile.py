"""Profiles and step timings: what is refused, what is recorded, and that neither changes what is learned."""

from __future__ import annotations

import gzip
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import ConfigError, LauncherError
from launcher.rundir import RunDir, read_json
from launcher.running.preflight import preflight
from launcher.running.transport import close_all, open_channels
from launcher.spec import ProfileConfig, RunPlan
from launcher.training.metriclog import MetricLog
from launcher.training.profiling import make_profile
from launcher.training.rankstatus import RankStatus
from launcher.training.runtime import Rank
from launcher.training.timing import PARTS, Stopwatch, over_ranks
from tests.planning_support import gpus, plan
from tests.processes.profile_cases import CASES

PROCESSES = Path(__file__).resolve().parent / "processes"


@pytest.mark.parametrize(
    ("words", "problem", "tries"),
    [
        (["profile.steps=4"], "profile.steps=4 has no effect with profile=none", "profile=torch profile.steps=4"),
        (
            ["profile=deepspeed", "profile.ranks=[1]"],
            "profile.ranks=[1] has no effect with profile=deepspeed, one step of rank 0",
            "profile=torch 'profile.ranks=[1]'",
        ),
        (["profile=nsys"], "profile=nsys records what GPUs do, and this run uses the CPU", "profile=torch"),
        (
            ["profile=torch", "profile.ranks=[0,2]"],
            "profile.ranks names 2, but the run's ranks are 0 to 1",
            "'profile.ranks=[0]'",
        ),
        (
            ["profile=comms", "profile.first_step=399"],
            "profile=comms records up to step 401, and the run ends at step 400",
            "profile.first_step=398",
        ),
        (
            ["profile=torch", "train.max_steps=2"],
            "profile=torch records up to step 12, and the run ends at step 2",
            "profile.first_step=1 profile.steps=2",
        ),
        (["profile=torch", "profile.ranks=[]"], "ranks from 0", "'profile.ranks=[0]'"),
    ],
)
def test_a_profile_that_would_record_nothing_is_refused(words: list[str], problem: str, tries: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*words)
    (found,) = caught.value.problems
    assert problem in found.text
    assert found.tries[0] == tries


def test_nsys_must_be_on_the_path(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    ready = plan("profile=nsys", f"run.dir={runs / 'run'}", gpus=gpus(1), hostname=socket.gethostname())
    monkeypatch.setenv("PATH", str(runs))
    assert "needs nsys, and the PATH has none" in preflight_says(ready)
    (runs / "nsys").write_text("#!/bin/sh\n")
    (runs / "nsys").chmod(0o755)
    assert "nsys" not in preflight_says(ready)  # it may miss the GPU


def preflight_says(ready: RunPlan) -> str:
    """What keeps a run from starting on this machine."""
    channels = open_channels(ready, queue.Queue())
    try:
        preflight(ready, channels)
    except LauncherError as error:
        return str(error)
    finally:
        close_all(list(channels.values()))
    return ""


@pytest.mark.parametrize(("done", "total"), [(10, 400), (0, 11)])
def test_steps_that_never_come_are_told(done: int, total: int, tmp_path: Path) -> None:
    """After a resume, or where the plan could not count the rows."""
    run = RunDir(tmp_path)
    run.ranks.mkdir()
    log = MetricLog(run, 0, RankStatus(run.rank(0), 0, "localhost"))
    watch = Stopwatch(torch.device("cpu"))
    profile = make_profile(ProfileConfig(name="torch"), run, Rank(0, 1, torch.device("cpu"), None), None, watch, log)
    profile.choose(done, total)
    for step in range(done + 1, total + 1):
        profile.begin_step(step)
        profile.end_step(step)
    profile.close()
    (event,) = (json.loads(line) for line in run.events.read_text().splitlines())
    assert event["event"] == "warning"
    assert f"records nothing: steps 10 to 12 of a run from {done + 1} to {total}" in event["text"]
    assert not run.profile.exists()


class Alone(Rank):
    """The only rank, without a process group."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_a_profile_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    run, rank = RunDir(tmp_path), Alone(0, 1, torch.device("cpu"), None)
    run.ranks.mkdir()
    run.profile.touch()  # a file where the folder should be
    log = MetricLog(run, 0, RankStatus(run.rank(0), 0, "localhost"))
    options = ProfileConfig(name="torch", first_step=1, steps=1)
    profile = make_profile(options, run, rank, None, Stopwatch(rank.device), log)
    profile.choose(0, 2)
    for step in (1, 2):
        profile.begin_step(step)
        profile.end_step(step)
    profile.close()
    (event,) = (json.loads(line) for line in run.events.read_text().splitlines())
    assert "profile=torch wrote nothing of rank 0: FileExistsError" in event["text"]


def test_numbers_over_ranks() -> None:
    rows = [(0.1, 1.0, 2.0, 0.5, 100, 60, 3.0, 4.0, 1), (0.3, 2.0, 4.0, 0.5, 50, 50, 5.0, 6.0, 2)]
    fields = over_ranks(rows)
    ranks = fields.pop("ranks")
    assert fields == {
        "data_wait_s": 0.3,  # the longest: all wait for it
        "forward_s": 1.5,
        "backward_s": 3.0,
        "optimizer_s": 0.5,
        "memory_gib": 5.0,
        "memory_reserved_gib": 6.0,
        "memory_moment": "backward",  # of rank 1, which took most
    }
    assert ranks["data_wait_s"] == [0.1, 0.3]
    assert ranks["fullest_tokens"] == [60, 50]
    assert (ranks["tokens"], ranks["memory_gib"], ranks["memory_reserved_gib"]) == ([100, 50], [3.0, 5.0], [4.0, 6.0])
    assert not [name for name in over_ranks([(0.1, 1.0, 2.0, 0.5, 100, 60, 0.0, 0.0, -1)]) if "memory" in name]


@pytest.mark.gpu
def test_cuda_parts_are_the_time_of_kernels() -> None:
    device = torch.device("cuda", 0)
    matrix = torch.randn(4096, 4096, device=device)
    watch = Stopwatch(device)
    for _ in range(2):  # the first has cuBLAS's start in it
        watch.begin()
        with watch.span("forward"):
            for _ in range(50):
                matrix @ matrix
        launched = watch.elapsed
        with watch.span("backward"):
            pass
        torch.cuda.current_stream().synchronize()
        elapsed = watch.elapsed
    parts = dict(zip(PARTS, watch.seconds(), strict=True))
    assert parts["forward"] <= elapsed + 1e-3
    assert parts["forward"] > 0.8 * elapsed > launched  # launching is over long before the kernels are
    assert parts["backward"] < 1e-3
    assert parts["data_wait"] == 0.0


# Real training ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profile")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
    command = [sys.executable, "-m", "tests.processes.profile_cases", str(out)]
    logs = [open(out / f"rank{rank}.log", "w") for rank in range(2)]  # noqa: SIM115
    ranks = [
        subprocess.Popen(command, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=log, stderr=log)
        for r, log in enumerate(logs)
    ]
    codes = [rank.wait(timeout=300) for rank in ranks]
    assert codes == [0, 0], "\n".join((out / f"rank{r}.log").read_text()[-3000:] for r in range(2))
    return out


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def profile_event(run: RunDir) -> dict[str, Any]:
    (event,) = (line for line in lines(run.events) if line["event"] == "profile")
    assert sorted(event["paths"]) == sorted(str(file.relative_to(run.path)) for file in run.profile.iterdir())
    return event


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_profile_changes_nothing_that_is_learned(outcomes: Path, name: str) -> None:
    wanted, found = (lines(RunDir(outcomes / case).metrics) for case in ("none", name))
    assert len(found) == (3 if "stopped" in name else 4)
    for line, expected in zip(found, wanted, strict=False):
        assert (line["loss"], line["grad_norm"]) == (expected["loss"], expected["grad_norm"])


def test_parts_of_a_step_fit_into_it(outcomes: Path) -> None:
    steps = lines(RunDir(outcomes / "none").metrics)
    for line in steps:
        assert line["micro_steps"] == 2
        ranks = line["ranks"]
        assert set(ranks) == {*(f"{part}_s" for part in PARTS), "tokens", "fullest_tokens"}
        assert all(
            0 < most < all_ <= 2 * most for most, all_ in zip(ranks["fullest_tokens"], ranks["tokens"], strict=True)
        )
        for rank in range(2):
            parts = [ranks[f"{part}_s"][rank] for part in PARTS]
            assert min(parts[1:]) > 0
            assert ranks["tokens"][rank] > 0
            late = 0.001 if rank == 0 else 0.1  # a step is as long as rank 0 sees it
            assert sum(parts) <= line["step_s"] + late
        assert line["data_wait_s"] == max(ranks["data_wait_s"])
        assert line["forward_s"] == pytest.approx(sum(ranks["forward_s"]) / 2, abs=2e-6)
    # Most of a step, unless something else takes the processor meanwhile.
    assert max((line["forward_s"] + line["backward_s"]) / line["step_s"] for line in steps) > 0.5


def test_every_change_of_phase_is_an_event(outcomes: Path) -> None:
    start = ["loading model", "starting DeepSpeed", "training"]
    for name, after in (("none", []), ("stopped", ["saving"])):
        events = lines(RunDir(outcomes / name).events)
        assert [line["phase"] for line in events if line["event"] == "phase"] == start + after


def test_torch_writes_a_trace_and_a_table_of_the_chosen_rank(outcomes: Path) -> None:
    """Also when the run is stopped in the middle: steps 3 and 4 were chosen, and there were three."""
    run = RunDir(outcomes / "stopped")
    event = profile_event(run)
    assert event["paths"] == ["profile/torch.rank1.steps3-3.json.gz", "profile/torch.rank1.txt"]
    assert "ui.perfetto.dev" in event["open"]
    trace = json.loads(gzip.decompress((run.path / event["paths"][0]).read_bytes()))["traceEvents"]
    names = [entry.get("name") for entry in trace if entry.get("cat") == "user_annotation"]
    assert [names.count(f"step {step}") for step in (1, 2, 3)] == [0, 0, 1]
    # Two micro-batches: the step is waited for, each of them, and the end.
    assert [names.count(part) for part in PARTS] == [4, 2, 2, 1]
    assert "aten::mm" in (run.path / event["paths"][1]).read_text()


def test_flops_of_all_micro_batches_are_counted_once(outcomes: Path) -> None:
    run = RunDir(outcomes / "deepspeed")
    event = profile_event(run)
    text = (run.path / event["paths"][0]).read_text()
    assert "2 micro-batches" in text
    (tokens, _) = lines(run.metrics)[1]["ranks"]["tokens"]
    arch = plan().arch["text_config"]
    mlp = 3 * arch["hidden_size"] * arch["intermediate_size"] * arch["num_hidden_layers"]
    (counted,) = set(re.findall(r"'Qwen3VLTextMLP': '([\d.]+) MMACs'", text))
    assert float(counted) * 1e6 == pytest.approx(tokens * mlp, rel=0.01)
    assert event["flops"] > event["macs"] > tokens * mlp
    assert event["params"] == sum(plan().parameters.values())  # ZeRO-3 has sharded them
    assert event["latency_s"] > 0


def test_collectives_are_counted_inside_the_chosen_steps(outcomes: Path) -> None:
    run = RunDir(outcomes / "comms")
    text = (run.path / profile_event(run)["paths"][0]).read_text()
    summary, stragglers = text.split("Breakdown with straggler effect")
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(re.findall(r"^(\w+)$", summary, re.MULTILINE))
    assert "reduce_scatter_tensor" in stragglers
    rows = re.findall(r"^ +[\d.]+ [KMG]?B +(\d+) +([\d.]+)", summary, re.MULTILINE)
    steps = lines(run.metrics)[1:3]
    assert len(rows) > 3
    assert sum(float(total) for _, total in rows) / 1e3 < sum(line["step_s"] for line in steps)


def test_deepspeed_still_needs_its_timers_mended(outcomes: Path) -> None:
    """When this fails, `recorders._mend_comms_timers` can go."""
    assert "elapsed(reset=False)" in read_json(outcomes / "source.json")


# nsys ------------------------------------------------------------------------------------------------------------


def inside_nsys(run: Path, deed: str) -> subprocess.Popen[bytes]:
    """A rank in the stand-in for nsys."""
    command = [sys.executable, str(PROCESSES / "in_nsys.py"), str(run), sys.executable, str(PROCESSES / "nsys.py")]
    return subprocess.Popen([*command, "--", deed])


def rank_inside(run: Path, outside: int) -> int:
    """Pid of the rank in nsys, once it trains."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        time.sleep(0.05)
        status = read_json(RunDir(run).rank(0)) if RunDir(run).rank(0).exists() else {}
        if status.get("state") == "running":
            assert status["pid"] != outside
            return int(status["pid"])
    raise AssertionError("the rank inside nsys did not begin")


@pytest.mark.parametrize(("deed", "code"), [("exit", 0), ("fail", 4), ("kill9", -signal.SIGKILL)])
def test_a_rank_in_nsys_ends_as_it_would_outside(deed: str, code: int, tmp_path: Path) -> None:
    assert inside_nsys(tmp_path, deed).wait(timeout=30) == code
    (event,) = lines(RunDir(tmp_path).events)
    assert (event["event"], event["tool"], event["paths"]) == ("profile", "nsys", ["profile/nsys.rank0.nsys-rep"])


def test_a_stop_lets_a_rank_in_nsys_save_and_keeps_the_report(tmp_path: Path) -> None:
    outside = inside_nsys(tmp_path, "train")
    rank_inside(tmp_path, outside.pid)
    outside.terminate()
    assert outside.wait(timeout=30) == 0
    assert read_json(RunDir(tmp_path).rank(0))["state"] == "stopped"
    assert "saved" in RunDir(tmp_path).log("localhost", 0).read_text()
    assert (RunDir(tmp_path).profile / "nsys.rank0.nsys-rep").exists()


def test_a_rank_in_nsys_dies_with_the_process_outside(tmp_path: Path) -> None:
    outside = inside_nsys(tmp_path, "train")
    pid = rank_inside(tmp_path, outside.pid)
    outside.kill()
    outside.wait(timeout=10)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{pid}/stat").exists():
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            break  # ended; in a container nobody may collect its exit code
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{pid}/stat").exists()


def test_nsys_that_does_not_start_is_told(tmp_path: Path) -> None:
    command = [sys.executable, str(PROCESSES / "in_nsys.py"), str(tmp_path), "false", "--", "exit"]
    assert subprocess.run(command, timeout=30, check=False).returncode == 3
    error = read_json(RunDir(tmp_path).rank(0))["error"]
    assert "nsys ended with 1 before the rank inside it began" in error["message"]
