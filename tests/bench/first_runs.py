"""Run Qwen3-VL-Reranker-8B (random weights) through `python -m launcher` on this machine's GPUs and print what it took.

    python -m tests.bench.first_runs FOLDER --gpus 2

--set speed (the default) times the reranker's workloads; --set tasks runs what people fine-tune: SFT, QLoRA, full
tuning, frozen parts against trained ones, and Qwen2.5-VL-72B with LoRA under ZeRO-3.

Each run is a real command with a run folder of its own, FOLDER/runs/NAME. FOLDER/results holds what to keep:
results.jsonl (one line a run), table.txt, logs.tar.gz (the run folders less weights), report.html of one run.

One that dies of CUDA memory is run once more with half of batch.max_tokens, and so are the ones after it. A run that
takes longer than its budget is ended and counted; one that no longer fits in --deadline is left out.

Predictions, written before any run; s/group is wall time of all GPUs together. Arithmetic: forward and backward
through frozen weights are 4 FLOPs a weight and token (6.95e9 weights, Qwen3-VL-8B's decoder), 6 when recomputed, 8 in
full tuning with recomputing; a plain eager model with peft reaches 35 to 40 % of the H200's 790 TFLOP/s.

    run                       GPUs   tokens a group   least s/group   predicted s/group   predicted peak GiB
    text, ZeRO-2                 1            2,668           0.097         0.26 - 0.30          17 + 7.5 a 1,000 tokens
    page, ZeRO-2                 1            4,141           0.180         0.50 - 0.56          the same
    imgq, ZeRO-2                 1            1,912           0.077         0.22 - 0.28          the same
    text, all recomputed         1            2,668           0.145         0.35 - 0.42          22 - 30
    text, ZeRO-3                 2            2,668           0.049         0.14 - 0.18          9 + 7.5 a 1,000 tokens
    page, ZeRO-3                 2            4,141           0.090         0.27 - 0.33          the same
    imgq, ZeRO-3                 2            1,912           0.039         0.13 - 0.18          the same
    text, ZeRO-2                 2            2,668           0.049         0.13 - 0.16          17 + 7.5 a 1,000 tokens
    text, full, ZeRO-3           2            2,668           0.094         0.28 - 0.40          80 - 95
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.rundir import RunDir
from tests.bench.results import Result, read_result, table
from tests.bench.workloads import write_workloads

REPO = Path(__file__).resolve().parents[2]
QUERIES = 4  # a GPU and optimizer step
USUAL = {
    "dataset": "jsonl",
    "loss": "listwise",
    "optim.warmup_steps": 2,
    "checkpoint.every_steps": "null",
    "checkpoint.at_end": "false",
    "checkpoint.keep_best": "false",
    "checkpoint.export": "false",
    "logging.monitor_every_s": 1,
}
RANDOM = {"model.weights": "random"}
MODELS = {
    "8b": {"model": "qwen3_vl_reranker_8b"} | RANDOM,
    "tiny": {"model": "tiny"},
}
ARTICLE = {"loss": "pointwise", "tune.r": 8, "tune.lora_alpha": 32, "optim.lr": 5e-6, "dataset.max_length": 4096}
LORA = {"tune": "lora", "tune.r": 8}
RECOMPUTE = {"memory.gradient_checkpointing": "all"}


@dataclass(frozen=True)
class Run:
    """A command and the seconds it may take."""

    name: str
    workload: str
    keys: dict[str, Any]
    budget_s: float = 150.0


def planned_runs(gpus: int, profile: str) -> list[Run]:
    """What is run on so many GPUs, the most wanted first."""
    stage = "stage2" if gpus == 1 else "stage3"
    lora = LORA | {"zero": stage}
    runs = [Run(f"{name}-lora-{stage}", name, lora) for name in ("text", "page", "imgq")]
    if gpus == 1:
        runs.append(Run("text-lora-stage2-recompute", "text", lora | RECOMPUTE))
    else:
        full = {"tune": "full", "zero": "stage3", "batch.max_tokens": 16384} | RECOMPUTE
        runs.append(Run("text-full-stage3", "text", full, budget_s=200.0))
        runs.append(Run("text-lora-stage2", "text", LORA | {"zero": "stage2"}))
    if profile != "none":
        keys = {"profile": profile, "profile.first_step": 6} | ({} if profile == "deepspeed" else {"profile.steps": 2})
        runs.append(Run(f"text-lora-{stage}-{profile}", "text", lora | keys))
    return runs


def task_runs(gpus: int) -> list[Run]:
    """Every kind of fine-tuning once, the most wanted first; the last three are compared with each other."""
    if gpus > 1:
        full = {"tune": "full", "zero": "stage3", "batch.max_tokens": 16384} | RECOMPUTE
        large = {"model": "qwen2_5_vl_72b", "zero": "stage3", "train.max_steps": 5, "batch.max_tokens": 4096}
        large |= RANDOM | LORA | RECOMPUTE | {"dataset.max_length": 2048, "batch.global_size": gpus}
        return [
            Run("text-72b-lora-stage3", "text", large, budget_s=330.0),
            Run("text-full-stage3", "text", full, budget_s=200.0),
        ]
    lora = LORA | {"zero": "stage2"}
    sft = {"task": "sft", "loss": "cross_entropy"}
    qlora = {"tune": "qlora", "tune.r": 8, "zero": "stage2"} | RECOMPUTE
    base = {"model": "qwen3_vl_4b", "tune": "full", "zero": "stage2", "batch.max_tokens": 8192} | RANDOM | RECOMPUTE
    return [
        Run("text-article-lora-stage2", "text", lora | ARTICLE),
        Run("chat-sft-lora-stage2", "chat", lora | sft),
        Run("text-qlora-stage2-recompute", "text", qlora),
        Run("text-lora-stage2-recompute", "text", lora | RECOMPUTE),
        Run("page-4b-all-trains", "page", base | {"tune.vision": "full"}),
        Run("page-4b-vision-frozen", "page", base),
        Run("page-4b-projector-only", "page", base | {"tune.language": "frozen"}),
    ]


def command(run: Run, folder: Path, files: dict[str, Path], options: argparse.Namespace) -> list[str]:
    """The whole command line of a run."""
    keys = MODELS[options.model] | USUAL
    keys |= {"train.max_steps": options.steps, "batch.global_size": options.queries * options.gpus} | run.keys
    keys |= {"dataset.train": files[run.workload], "run.dir": folder, "gpus": options.gpus}
    return [sys.executable, "-m", "launcher", *(f"{key}={value}" for key, value in keys.items())]


def execute(argv: list[str], folder: Path, budget_s: float) -> tuple[float, float]:
    """Run a command to its end, or until its budget is spent; its start and end. Output goes to FOLDER.txt."""
    begun = time.time()
    with open(f"{folder}.txt", "w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, cwd=REPO, start_new_session=True)
        try:
            process.wait(timeout=budget_s)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when this program is told to end
            if process.poll() is None:
                _end(process)
    return begun, time.time()


def _end(process: subprocess.Popen[bytes]) -> None:
    for _ in range(2):  # the first asks for a stop, the second for an end at once
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_words(folder: Path) -> str:
    """The end of what the command printed."""
    return " | ".join(Path(f"{folder}.txt").read_text(errors="replace").splitlines()[-4:])


def out_of_memory(folder: Path) -> bool:
    """Whether the run's outcome tells of CUDA memory."""
    outcome = RunDir(folder).outcome
    return outcome.is_file() and "out of memory" in outcome.read_text().lower()


def half_the_tokens(folder: Path, run: Run) -> Run:
    """The run again, its micro-batches half as large."""
    tokens = json.loads(RunDir(folder).plan.read_text())["batch"]["max_tokens"] // 2
    return Run(f"{run.name}-half", run.workload, run.keys | {"batch.max_tokens": tokens}, run.budget_s)


def planned_tokens(argv: list[str]) -> int:
    """batch.max_tokens as the planner chooses it."""
    done = subprocess.run([*argv[:3], "plan", "--json", *argv[3:]], cwd=REPO, capture_output=True, check=True)
    return int(json.loads(done.stdout)["batch"]["max_tokens"])


def run_all(runs: list[Run], files: dict[str, Path], options: argparse.Namespace) -> list[Result]:
    """Every run that fits into the time, one after another."""
    folder, deadline = options.folder / "runs", time.time() + options.deadline
    folder.mkdir(parents=True, exist_ok=True)
    waiting, results, halve = list(runs), [], False
    while waiting:
        run = waiting.pop(0)
        left = deadline - time.time()
        if left < min(run.budget_s, 60):
            results.append(Result(name=run.name, gpus=options.gpus, note=f"left out: {left:.0f} s left"))
            continue
        where = folder / run.name
        argv = command(run, where, files, options)
        if halve and "batch.max_tokens" not in run.keys and run.keys.get("memory.gradient_checkpointing") != "all":
            argv.append(f"batch.max_tokens={planned_tokens(argv) // 2}")
        print(f"{time.strftime('%H:%M:%S')}  {run.name}", flush=True)
        begun, ended = execute(argv, where, min(run.budget_s, left))
        result = read_result(run.name, options.gpus, RunDir(where), begun, ended)
        result.note = result.note or ("" if result.status == "done" else last_words(where))
        results.append(result)
        print(table(results[-1:]), flush=True)
        if out_of_memory(where) and not run.name.endswith("-half"):
            halve = True
            waiting.insert(0, half_the_tokens(where, run))
    return results


def keep(results: list[Result], folder: Path) -> None:
    """The few files that are worth keeping."""
    kept, runs = folder / "results", folder / "runs"
    kept.mkdir(exist_ok=True)
    (kept / "results.jsonl").write_text("".join(json.dumps(result.data()) + "\n" for result in results))
    (kept / "table.txt").write_text(table(results) + "\n")
    with tarfile.open(kept / "logs.tar.gz", "w:gz") as archive:
        archive.add(runs, "runs", filter=lambda info: None if _is_large(info) else info)
    profiles = sorted(runs.glob("*/profile"))
    if profiles:
        with tarfile.open(kept / "profile.tar.gz", "w:gz") as archive:
            for profile in profiles:
                archive.add(profile, f"{profile.parent.name}/profile")
    page = next((p for result in results if result.status == "done" for p in [runs / result.name / "report.html"]
                 if p.is_file()), None)  # fmt: skip
    if page is not None:
        shutil.copy(page, kept / "report.html")


def _is_large(info: tarfile.TarInfo) -> bool:
    """Weights, traces, and pages that can be made again."""
    name = Path(info.name).name
    return name in ("checkpoints", "export", "profile") or (name == "report.html" and info.size > 1_000_000)


def main() -> None:
    """Parse, run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, choices=[1, 2], default=1)
    parser.add_argument("--set", choices=["speed", "tasks"], default="speed", help="which runs")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="the run of this name")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--queries", type=int, default=QUERIES, help="a GPU and optimizer step")
    parser.add_argument("--model", choices=list(MODELS), default="8b", help="tiny: try the script on a CPU")
    parser.add_argument("--profile", choices=["none", "torch", "nsys", "deepspeed", "comms"], default="none")
    parser.add_argument("--deadline", type=float, default=560, help="seconds for everything")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    begun = time.time()
    files = write_workloads(options.folder / "data")
    options.deadline -= time.time() - begun
    every = task_runs(options.gpus) if options.set == "tasks" else planned_runs(options.gpus, options.profile)
    runs = [r for r in every if not options.only or r.name in options.only]
    results = run_all(runs, files, options)
    keep(results, options.folder)
    print(f"\n{table(results)}\n{time.time() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
