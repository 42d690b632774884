"""One run of either side of tests/bench/against_peer.py, and what came out of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from launcher.rundir import RunDir
from tests.bench.peer import ON_CPU, ON_GPU, Setting, arguments, environment, read_log, sums
from tests.bench.steady import steady

REPO = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("peer_worker.py")
PATIENCE_S = 15  # with a run that is asked to end
QUIET = {
    **{"checkpoint.every_steps": "null", "checkpoint.at_end": "false", "checkpoint.keep_best": "false"},
    **{"checkpoint.export": "false", "eval.every_steps": "null", "logging.monitor_every_s": "null"},
    **{"optim.schedule": "constant", "optim.warmup_steps": 0, "dataset": "jsonl", "tune": "lora", "tune.r": 8},
}
TASKS = {"rerank": {"loss": "listwise"}, "sft": {"task": "sft", "loss": "cross_entropy"}}
MODEL = "qwen3_vl_reranker_8b"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all runs have in common."""

    folder: Path
    model: Path  # folder of the checkpoint
    groups: int  # rows an optimizer step, over all GPUs
    steps: int
    gpus: int
    lr: float
    small: bool  # on the CPU
    words: tuple[str, ...]  # further words of our command
    python: str  # the peer's
    path: tuple[str, ...]  # folders of its packages
    seed: int = 42  # of the order of rows


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is to be made; without a setting it is ours."""

    workload: str
    documents: int  # of a row
    setting: Setting | None

    @property
    def task(self) -> str:
        """Of the launcher."""
        return "sft" if self.workload == "chat" else "rerank"

    def words(self, bench: Bench) -> str:
        """What distinguishes it, for the table."""
        return " ".join(bench.words) if self.setting is None else str(self.setting)

    def needs_more_than(self, other: Job) -> bool:
        """Whether it is the same but for larger micro-batches."""
        if self.setting is None or other.setting is None or self.workload != other.workload:
            return False
        return self.setting.micro > other.setting.micro and replace(self.setting, micro=1) == replace(
            other.setting, micro=1
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run measured, step by step; lists are empty when it came to no step."""

    workload: str
    side: str  # launcher | ms-swift
    setting: str
    groups: int  # an optimizer step
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    reserved_gib: float | None = None  # peak, worst rank
    waited_s: tuple[float, ...] = ()  # for data
    tokens: float | None = None  # computed in a step
    whole_s: float = 0.0
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """Of a group."""
        return median(steady(self.step_s)) / self.groups if len(self.step_s) > 2 else None

    @property
    def wait_share(self) -> float | None:
        """Of the steps' time."""
        return sum(steady(self.waited_s)) / sum(steady(self.step_s)) if self.waited_s else None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A process of the peer that waits for its arguments."""

    process: subprocess.Popen[bytes]
    documents: int  # of a row: its environment says so
    log: Path

    def end(self) -> None:
        """It, and what it started."""
        _end(self.process)


def start_peer(job: Job, bench: Bench, number: int) -> Peer:
    """A process that loads the peer's libraries and waits; several GPUs' processes begin at once."""
    env = environment(job.documents, bench.folder / "cache", bench.path, on_gpu=not bench.small)
    logs = bench.folder / "peer"
    logs.mkdir(parents=True, exist_ok=True)
    argv = [bench.python, str(WORKER)]
    if bench.gpus > 1:
        argv = [bench.python, "-m", "torch.distributed.run", "--nproc_per_node", str(bench.gpus), "-m", "swift.cli.sft"]
        argv += _arguments(job, bench)
    log = logs / f"{number:02}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env, cwd=bench.folder, start_new_session=True
        )
    return Peer(process=process, documents=job.documents, log=log)


def _arguments(job: Job, bench: Bench) -> list[str]:
    assert job.setting is not None
    found = arguments(
        job.setting,
        task=job.task,
        model=bench.model,
        rows=bench.folder / "data" / f"{job.workload}.swift.jsonl",
        out=bench.folder / "peer" / f"{job.workload}-{job.setting}",
        groups=bench.groups,
        steps=bench.steps,
        gpus=bench.gpus,
        lr=bench.lr,
    )
    return found + (ON_CPU if bench.small else ON_GPU)


def run_peer(peer: Peer, job: Job, bench: Bench, limit_s: float) -> Outcome:
    """Let a waiting process train, to its end or for so many seconds."""
    begun, process = time.time(), peer.process
    print(f"{time.strftime('%H:%M:%S')}  {job.workload} {job.setting}: {peer.log}", flush=True)
    out = bench.folder / "peer" / f"{job.workload}-{job.setting}" / "logging.jsonl"
    out.unlink(missing_ok=True)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(_arguments(job, bench)).encode() + b"\n")
        process.stdin.close()
    except BrokenPipeError:
        pass  # it ended while it loaded its libraries: its log says why
    note = _why(peer.log) if _wait(process, limit_s) else ""
    assert job.setting is not None
    found = read_log(out, sums(job.setting, task=job.task, groups=bench.groups, gpus=bench.gpus))
    return Outcome(
        workload=job.workload,
        side="ms-swift",
        setting=str(job.setting),
        groups=bench.groups,
        losses=tuple(found.losses),
        grad_norms=tuple(found.grad_norms),
        step_s=tuple(found.step_s),
        reserved_gib=found.reserved_gib,
        whole_s=time.time() - begun,
        note=note,
    )


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for its end, or end it; whether it failed."""
    try:
        return process.wait(timeout=limit_s) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started: workers that load data may outlive it. It is asked first, so that it ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _why(log: Path) -> str:
    """The last line that looks like an error, else the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line[:60] or "out of memory" in line]
    return (errors or lines or ["no output"])[-1][-300:]


def count_rows(jobs: Sequence[Job], bench: Bench) -> None:
    """Have the launcher count the tokens of its rows, all workloads at once; raises RuntimeError where one can't."""
    logs = [bench.folder / f"{job.workload}.check.txt" for job in jobs]
    checks = [
        _launch(("check", "data"), job, bench, bench.folder / "check", log) for job, log in zip(jobs, logs, strict=True)
    ]
    for check, log in zip(checks, logs, strict=True):
        if check.wait():
            raise RuntimeError(f"{log}: {_why(log)}")


def _launch(verb: Sequence[str], job: Job, bench: Bench, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "launcher", *verb, *_words(job, bench, folder)],
            stdout=out,
            stderr=out,
            cwd=REPO,
            start_new_session=True,
            env={**os.environ, **({"DS_ACCELERATOR": "cpu"} if bench.small else {})},
        )


def run_ours(job: Job, bench: Bench, limit_s: float) -> Outcome:
    """The launcher's own command."""
    begun = time.time()
    folder = bench.folder / "runs" / f"{job.workload}-{time.strftime('%H%M%S')}"
    folder.parent.mkdir(exist_ok=True)
    log = folder.with_suffix(".txt")
    process = _launch([], job, bench, folder, log)
    note = _why(log) if _wait(process, limit_s) else ""
    run = RunDir(folder)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()] if run.metrics.is_file() else []
    steps = [line for line in lines if line["kind"] == "step"]
    return Outcome(
        workload=job.workload,
        side="launcher",
        setting=job.words(bench),
        groups=bench.groups,
        losses=_each(steps, "loss"),
        grad_norms=_each(steps, "grad_norm"),
        step_s=_each(steps, "step_s"),
        reserved_gib=max(
            (line["memory_reserved_gib"] for line in steps if "memory_reserved_gib" in line), default=None
        ),
        waited_s=_each(steps, "data_wait_s"),
        tokens=median(line["tokens_per_s"] * line["step_s"] for line in steps) if steps else None,
        whole_s=time.time() - begun,
        note=note,
    )


def _each(steps: list[dict[str, Any]], field: str) -> tuple[float, ...]:
    """A field of every step; what is no number is NaN."""
    return tuple(float("nan") if line[field] is None else line[field] for line in steps)


def _words(job: Job, bench: Bench, folder: Path) -> list[str]:
    keys: dict[str, Any] = QUIET | TASKS[job.task]
    keys |= {"model": "local" if bench.small else MODEL, "model.path": bench.model, "run.dir": folder}
    keys |= {"dataset.train": bench.folder / "data" / f"{job.workload}.jsonl", "gpus": bench.gpus}
    keys |= {"batch.global_size": bench.groups, "train.max_steps": bench.steps, "train.seed": bench.seed}
    keys |= {"optim.lr": bench.lr, "zero": "stage0" if bench.small else "stage1"}
    keys |= {"precision": "fp32" if bench.small else "bf16"}
    keys |= dict(word.split("=", 1) for word in bench.words)  # which may be other values of the keys above
    return [f"{key}={value}" for key, value in keys.items()]
