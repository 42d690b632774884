"""What `zero=auto` chooses against settings tried by hand, on real rows of three workloads: seconds of a step.

    python -m tests.bench.by_hand FOLDER --stage stage2   # one GPU, Qwen3-VL-Reranker-8B LoRA, random weights
    python -m tests.bench.by_hand FOLDER --stage stage3   # adds to the same results
    python -m tests.bench.by_hand FOLDER --model tiny --device cpu     # tries the script

One model and engine; recomputed layers and batch.max_tokens are changed in place, as they are no
part of either. A setting that runs out of memory is noted and left. The chosen setting runs among the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

from launcher.planning.config import read_config
from launcher.planning.plan import make_plan
from launcher.running.facts import gather_facts
from launcher.spec import RunPlan
from launcher.training import processors, tuning
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer, make_engine, optimizer_step
from launcher.training.pixels import Pixels
from launcher.training.prepare import prepare
from launcher.training.runtime import Rank, distributed
from launcher.training.steps import StepMaker
from launcher.training.timing import Stopwatch
from tests.bench.workloads import write_workloads

WORKLOADS = ("text", "page", "imgq")
TOKENS = (4096, 8192, 12288, 16384, 20480, 24576)
STAGES = ("stage2", "stage3")
STEPS, WARM_UP = 4, 1


def words_of(options: argparse.Namespace, rows: Path) -> list[str]:
    """The command line of a run, but for what is tried."""
    return [
        f"model={options.model}",
        "model.weights=random",
        *("dataset=jsonl", f"dataset.train={rows}", "loss=listwise", "tune=lora", "tune.r=8"),
        *("train.max_steps=50", "optim.warmup_steps=2", f"batch.global_size={options.queries}", "gpus=1"),
        *("checkpoint.export=false", f"run.dir={options.folder / 'run'}"),
    ]


def plan_of(words: list[str]) -> RunPlan:
    """The plan of a command line on this machine."""
    config = read_config(words).config
    return make_plan(config, gather_facts(config), now=datetime.now(timezone.utc))


def tried(layers: int, chosen: RunPlan, stage: str) -> Iterator[tuple[int, int]]:
    """(recomputed layers, tokens of a micro-batch) tried with a stage, what was chosen among them."""
    if stage == "stage2":
        found = [(again, tokens) for again in (0, layers // 2, layers) for tokens in TOKENS]
    else:
        found = [(0, 8192), (0, 16384), (layers, 16384)]
    own = (chosen.checkpointed_layers, chosen.batch.max_tokens)
    yield from dict.fromkeys([own, *found] if chosen.zero_name == stage else found)


def set_layers(scorer: Any, count: int) -> None:
    """Recompute the first `count` decoder layers from now on."""
    for module in scorer.modules():
        if hasattr(module, "fused"):
            module.fused.recompute = False
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    tuning.checkpoint_layers(scorer.core, count)


def seconds(engine: Any, plan: RunPlan, maker: StepMaker, groups: Any, rank: Rank) -> tuple[float, int]:
    """Median seconds of a step over the same rows, and its micro-batches."""
    maker.plan = plan
    watch, found, share = Stopwatch(rank.device), [], maker.training(groups)
    for _ in range(WARM_UP + STEPS):
        begun = time.perf_counter()
        optimizer_step(engine, plan, share.micro_batches, share.units, rank, watch)
        watch.begin()
        found.append(time.perf_counter() - begun)
    return median(found[WARM_UP:]), len(share.micro_batches)


def run_stage(options: argparse.Namespace, files: dict[str, Path], chosen: dict[str, RunPlan], stage: str) -> list[Any]:
    """Every setting of a stage, on every workload."""
    results = []
    begun = time.monotonic()
    first = plan_of([*words_of(options, files["text"]), f"zero={stage}", "batch.max_tokens=8192"])
    with distributed(first) as rank:
        processor = processors.load_processor(first)
        scorer = build_scorer(first, processor, rank.device)
        engine = make_engine(scorer, first)
        layers = len(scorer.core.language_model.layers)
        for name in WORKLOADS:
            plan = plan_of([*words_of(options, files[name]), f"zero={stage}", "batch.max_tokens=8192"])
            rows = prepare(plan, "train", lambda: None)
            groups = [rows[i] for i in range(options.queries)]
            maker = StepMaker(plan, make_encoder(plan, processor), Pixels(processor), rank=0, padded=scorer.padded,
                              warn=print)  # fmt: skip
            for again, tokens in tried(layers, chosen[name], stage):
                if time.monotonic() - begun > options.deadline:
                    print("out of time", flush=True)
                    break
                own = chosen[name].zero_name == stage and (again, tokens) == (
                    chosen[name].checkpointed_layers,
                    chosen[name].batch.max_tokens,
                )
                batch = dataclasses.replace(plan.batch, max_tokens=tokens)
                asked = dataclasses.replace(plan, batch=batch, checkpointed_layers=again)
                set_layers(scorer, again)
                line = {"workload": name, "zero": stage, "recomputed": again, "max_tokens": tokens, "chosen": own}
                try:
                    if rank.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    took, micro_steps = seconds(engine, asked, maker, groups, rank)
                    peak = torch.cuda.max_memory_reserved() / 2**30 if rank.device.type == "cuda" else 0.0
                    line |= {"step_s": round(took, 4), "micro_steps": micro_steps, "reserved_gib": round(peak, 1)}
                except torch.OutOfMemoryError:
                    line |= {"step_s": None, "note": "out of memory"}
                    engine.zero_grad()
                    gc.collect()
                    torch.cuda.empty_cache()
                print(json.dumps(line), flush=True)
                results.append(line)
        engine.destroy()
    return results


def table(results: list[Any]) -> str:
    """For each workload what was chosen, the best by hand, and the share of its throughput that was reached."""
    lines = []
    for name in WORKLOADS:
        mine = [r for r in results if r["workload"] == name and r["step_s"] is not None]
        if not mine:
            continue
        own = next((r for r in mine if r["chosen"]), None)
        best = min(mine, key=lambda r: r["step_s"])
        shown = [f"{r['zero']}, {r['recomputed']} recomputed, {r['max_tokens']:,} tokens: {r['step_s']:.3f} s"
                 for r in (own, best) if r]  # fmt: skip
        share = f"{100 * best['step_s'] / own['step_s']:.1f} %" if own else "the choice did not run"
        lines.append(f"{name:6} chosen {shown[0]}   best {shown[-1]}   {share}")
    return "\n".join(lines)


def main() -> None:
    """Prepare the rows, ask the planner, try by hand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="qwen3_vl_reranker_8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--queries", type=int, default=8, help="of an optimizer step")
    parser.add_argument("--deadline", type=float, default=260, help="seconds for a stage")
    parser.add_argument("--stage", choices=STAGES, default="stage2")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    files = write_workloads(options.folder / "data")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29700"}
    chosen = {}
    for name in WORKLOADS:
        words = words_of(options, files[name])
        prepare(plan_of([*words, "batch.max_tokens=8192"]), "train", lambda: None)
        chosen[name] = plan_of([*words, "zero=auto"] if options.device == "cuda" else words)
        told = chosen[name].time
        print(f"{name}: chosen {chosen[name].zero_name}, {chosen[name].checkpointed_layers} recomputed, "
              f"{chosen[name].batch.max_tokens} tokens, {told.step_s if told else 0:.3f} s a step foretold, "
              f"{sum(chosen[name].memory.values()) / 2**30:.1f} GiB", flush=True)  # fmt: skip
    kept = options.folder / "by_hand.jsonl"
    with kept.open("a") as out:
        out.writelines(json.dumps(line) + "\n" for line in run_stage(options, files, chosen, options.stage))
    print(table([json.loads(line) for line in kept.read_text().splitlines()]))


if __name__ == "__main__":
    main()
