"""Memory foretold and measured: `predict SET`, `measure SET FOLDER`, `table FOLDER [PREDICTIONS]`.

    python -m tests.bench.memory predict judge > tests/bench/memory_predicted_judge.jsonl     # no GPU: commit it first
    python -m tests.bench.memory measure judge FOLDER
    python -m tests.bench.memory table FOLDER                  # or tests/bench/memory_measured_judge.jsonl

Sets are those of tests.bench.memory_cases: constants of the planner for plain layers were fitted on `fit`, and judged
on `judge` (one GPU) and `judge2` (two); `fused` and `fused2` are those of fused layers. Every case is a process (a
rank, for two GPUs) of its own, so that one that dies of memory does not end the others. FOLDER holds measured.jsonl,
records/ (one file a rank), logs/.

`measure` with --device cpu tries the script with the tiny model in place of every other; nothing is counted there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.planning.memory import moments
from launcher.planning.models import parameter_counts
from launcher.planning.rates import rates_of
from launcher.planning.setting import Setting
from launcher.planning.speed import PICTURES, predict
from tests.bench.memory_cases import MICRO_STEPS, SETS, Case
from tests.bench.speed_runs import times
from tests.planning_support import setting_of

REPO = Path(__file__).resolve().parents[2]
GIB = 2**30


def predicted(case: Case) -> dict[str, Any]:
    """What the planner says of a case, and what others say."""
    setting = setting_of(case.plan())
    if setting.config.tune.name == "qlora":  # memory_rank builds random 4-bit weights as pretrained ones load
        model = replace(setting.config.model, weights="pretrained")
        setting = replace(setting, config=replace(setting.config, model=model))
    found = moments(setting, case.work.load)
    fullest = max(found, key=lambda name: sum(found[name].values()))
    return {
        "case": case.name,
        "gpus": case.gpus,
        "words": list(case.words(tiny=False)),
        "load": asdict(case.work.load),
        "moment": fullest,
        "moments": found,
        "step_s": _step_s(case, setting),
        "others": _others(setting),
    }


def _step_s(case: Case, setting: Setting) -> float:
    """Seconds of a step of MICRO_STEPS micro-batches on every rank, as the planner foretells them; nothing is read."""
    found = predict(setting, times(case.work.load, MICRO_STEPS * case.gpus), MICRO_STEPS, rates_of("h200"))
    return found.step_s - found.parts.get(PICTURES, 0.0)


def _others(setting: Setting) -> dict[str, int]:
    """Bytes of a GPU by DeepSpeed's estimator of the stage (that of ZeRO-2 below it) and by accelerate's
    estimate-memory: both know the model alone, all of it trained with Adam."""
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output, which is JSON here
        from accelerate.commands.estimate import estimate_training_usage
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    shape, counts = setting.shape, sum(parameter_counts(setting.shape).values())
    sizes = {"num_gpus_per_node": setting.slots, "num_nodes": setting.world // setting.slots, "cpu_offload": False}
    if setting.stage == 3:
        _, states, _ = estimate_zero3_model_states_mem_needs(
            counts, shape.vocab * shape.hidden, cpu_offload_params=False, **sizes
        )
    else:
        _, states = estimate_zero2_model_states_mem_needs(counts, **sizes)
    rule = estimate_training_usage(4 * counts, "bfloat16")
    return {"deepspeed": states, "accelerate": max(rule.values())}


@dataclass
class Started:
    """The processes of a case, which wait to be told."""

    case: Case
    processes: list[subprocess.Popen[str]] = field(default_factory=list)


def start(group: str, case: Case, folder: Path, device: str) -> Started:
    """Have the ranks load their libraries."""
    plan = case.plan(device=device)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {name: value for name, value in plan.env.items() if name != "OMP_NUM_THREADS"}
    shared = {**os.environ, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "4"}
    shared |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))}
    argv = [sys.executable, "-W", "ignore", "-m", "tests.bench.memory_rank", group, case.name, str(folder), device]
    started = Started(case)
    for rank in range(case.gpus):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.gpus, "LOCAL_SIZE": case.gpus}
        with open(folder / "logs" / f"{case.name}.rank{rank}.log", "w") as log:
            started.processes.append(
                subprocess.Popen(
                    argv,
                    env={**shared, **{name: str(value) for name, value in names.items()}},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    cwd=REPO,
                )
            )
    return started


def finish(started: Started, folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Tell the ranks to begin, wait, and read what they wrote; a rank without a record has the reason."""
    begun = time.monotonic()
    for process in started.processes:
        if process.stdin is not None:
            try:
                process.stdin.write("go\n")
                process.stdin.close()
            except BrokenPipeError:
                pass  # it has ended: its log says why
    late = False
    while any(process.poll() is None for process in started.processes):
        late = time.monotonic() - begun > timeout_s
        if late or any(process.returncode for process in started.processes):  # the others would wait for ever
            time.sleep(0 if late else 3)
            break
        time.sleep(0.05)
    _end(started)
    records = []
    for rank, process in enumerate(started.processes):
        path = folder / "records" / f"{started.case.name}.rank{rank}.json"
        if path.is_file():
            records.append(json.loads(path.read_text()))
        else:
            why = f"no answer in {timeout_s:.0f} s" if late else f"ended with {process.returncode}"
            records.append({"case": started.case.name, "rank": rank, "error": why})
        records[-1]["wall_s"] = round(time.monotonic() - begun, 1)
    return records


def _end(started: Started) -> None:
    for process in started.processes:
        process.kill()
        process.wait()


def measure(group: str, folder: Path, device: str, only: list[str], deadline_s: float) -> None:
    """Measure every case of a set; each line is printed, and kept, as soon as it is known."""
    for name in ("logs", "records"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    cases = [case for case in SETS[group] if not only or case.name in only]
    waiting: Started | None = None
    for number, case in enumerate(cases):
        current = waiting or start(group, case, folder, device)
        waiting = None
        left = deadline_s - (time.monotonic() - begun)
        if left < 15:
            _end(current)
            print(f"left out, {left:.0f} s are left: {', '.join(c.name for c in cases[number:])}", flush=True)
            break
        if number + 1 < len(cases):
            waiting = start(group, cases[number + 1], folder, device)
        records = finish(current, folder, min(case.timeout_s, left))
        with open(folder / "measured.jsonl", "a") as out:
            out.writelines(json.dumps({"set": group, **record}) + "\n" for record in records)
        print("\n".join(_line(record) for record in records), flush=True)
    if waiting is not None:
        _end(waiting)
    print(f"{time.monotonic() - begun:.0f} s in all")


def _line(record: dict[str, Any]) -> str:
    told = f"{record['case']:28} rank {record['rank']}  {record['wall_s']:6.1f} s"
    if "error" in record:
        return f"{told}  {record['error'][:150]}"
    peak = max(record["memory"]["allocated"].values(), default=0) / GIB
    reserved = max(record["memory"]["reserved"].values(), default=0) / GIB
    return f"{told}  {peak:7.2f} allocated {reserved:7.2f} reserved GiB  {step_s(record):7.3f} s a step"


def step_s(record: dict[str, Any]) -> float:
    """Seconds of a step: the middle one of those that are no warm-up."""
    seconds: list[float] = record["step_s"]
    return statistics.median(seconds[2:] if len(seconds) > 4 else seconds[1:])


# Where a moment that was measured stands among those that are foretold.
TOLD = {
    "loading": "loading",
    "start": "loading",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}
OUTSIDE = ("CUDA context and NCCL", "fragmentation")  # parts that are not allocated tensors


def compare(told: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Measured bytes beside those foretold, by moment and in all."""
    memory = record["memory"]
    measured: dict[str, int] = {}
    for name, size in memory["allocated"].items():
        measured[TOLD[name]] = max(measured.get(TOLD[name], 0), size)
    context, fragments = OUTSIDE
    parts = told["moments"]
    tensors = {m: sum(v for part, v in p.items() if part not in OUTSIDE) for m, p in parts.items()}
    reserved = {m: tensors[m] + p.get(fragments, 0) for m, p in parts.items()}
    return {
        "case": told["case"],
        "moments": {m: (tensors[m], measured[m]) for m in tensors if m in measured},
        "allocated": (max(tensors.values()), max(measured.values())),
        "reserved": (max(reserved.values()), max(memory["reserved"].values())),
        "total": (
            max(reserved[m] + parts[m].get(context, 0) for m in parts),
            max(memory["reserved"].values()) + record["other_bytes"],
        ),
        "others": {name: (size, max(memory["reserved"].values())) for name, size in told["others"].items()},
    }


def table(folder: Path, predictions: list[Path]) -> str:
    """Ratios of foretold to measured bytes, and how far off they are in the mean and at worst."""
    told: dict[str, Any] = {}
    for path in predictions:
        told |= {(line := json.loads(text))["case"]: line for text in path.read_text().splitlines()}
    lines = [
        f"{'foretold / measured':28} {'loading':>8} {'forward':>8} {'backward':>8} {'optimiz.':>8} {'alloc.':>8}"
        f" {'reserved':>8} {'total':>8} {'step':>8} {'GiB':>7} {'DeepSpeed':>9} {'accelerate':>10} {'s/step':>7}"
    ]
    errors: dict[str, list[float]] = {}
    kept = folder if folder.is_file() else folder / "measured.jsonl"
    for text in kept.read_text().splitlines():
        record = json.loads(text)
        if record["rank"] or record["case"] not in told:
            continue
        if "error" in record or not record["memory"]["allocated"]:
            lines.append(f"{record['case']:28} {record.get('error', 'nothing was counted')[:100]}")
            continue
        row = compare(told[record["case"]], record)
        ratios = {name: a / b for name, (a, b) in row["moments"].items()}
        sums = {name: row[name][0] / row[name][1] for name in ("allocated", "reserved", "total")}
        sums["step"] = told[record["case"]]["step_s"] / step_s(record)
        others = {name: a / b for name, (a, b) in row["others"].items()}
        for name, ratio in {**ratios, **sums, **others}.items():
            errors.setdefault(name, []).append(ratio - 1)
        cells = [ratios.get(name, float("nan")) for name in ("loading", "forward", "backward", "optimizer")]
        cells += list(sums.values())
        lines.append(
            f"{row['case']:28} {' '.join(f'{cell:8.3f}' for cell in cells)} {row['total'][1] / GIB:7.2f}"
            f" {others['deepspeed']:9.2f} {others['accelerate']:10.2f} {step_s(record):7.3f}"
        )
    for name, found in errors.items():
        mean, worst = statistics.fmean(map(abs, found)), max(found, key=abs)
        below = min(found)
        lines.append(
            f"{name:12} mean error {100 * mean:6.2f} %   worst {100 * worst:+7.2f} %   most below {100 * below:+7.2f} %"
            f"   ({len(found)} cases)"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    told = verbs.add_parser("predict")
    told.add_argument("set", choices=list(SETS))
    done = verbs.add_parser("measure")
    done.add_argument("set", choices=list(SETS))
    done.add_argument("folder", type=Path)
    done.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    done.add_argument("--only", action="append", default=[], metavar="CASE")
    done.add_argument("--deadline", type=float, default=540, help="seconds for everything")
    shown = verbs.add_parser("table")
    shown.add_argument("folder", type=Path)
    shown.add_argument("predictions", type=Path, nargs="*", help="default: memory_predicted_*.jsonl beside this file")
    options = parser.parse_args()
    if options.verb == "predict":
        for case in SETS[options.set]:
            print(json.dumps(predicted(case)))
    elif options.verb == "measure":
        measure(options.set, options.folder.resolve(), options.device, options.only, options.deadline)
    else:
        files = options.predictions or sorted(Path(__file__).parent.glob("memory_predicted_*.jsonl"))
        print(table(options.folder, files))


if __name__ == "__main__":
    main()
