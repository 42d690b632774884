"""A query computed once for all of its documents against once for each, on CPU: seconds, tokens and loss of a step.

    python -m tests.bench.shared_prefix FOLDER [--workload imgq] [--least 1.25]

The tiny model, one process, the same rows; the two take turns, so that a busy machine slows both. Exit code 1 when the
ratio of the medians is below --least, or the losses differ: sharing has then lost what it is for.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

from launcher.planning.config import read_config
from launcher.planning.plan import make_plan
from launcher.running.facts import gather_facts
from launcher.training import processors
from launcher.training.batching import MicroBatch
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.losses import loss_of
from launcher.training.pixels import Pixels
from launcher.training.prepare import prepare
from launcher.training.steps import StepMaker
from tests.bench.workloads import write_workloads

ROUNDS, WARM_UP = 5, 1


def batches_of(plan: Any, scorer: Any, processor: Any, groups: list[Any]) -> tuple[MicroBatch, ...]:
    """Micro-batches of one step over the groups."""
    encoder = make_encoder(plan, processor)
    maker = StepMaker(plan, encoder, Pixels(processor), rank=0, padded=scorer.padded, warn=print)
    return tuple(maker.training(groups).held().micro_batches)


def step(plan: Any, scorer: Any, batches: tuple[MicroBatch, ...]) -> tuple[float, float]:
    """(seconds, loss) of a forward and backward pass over micro-batches."""
    loss, total, begun = loss_of(plan.config), 0.0, time.perf_counter()
    for batch in batches:
        value = loss(scorer(batch), batch, plan.config.loss)
        value.backward()
        total += float(value.detach())
    took = time.perf_counter() - begun
    scorer.zero_grad(set_to_none=True)
    return took, total


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", choices=["text", "page", "imgq"], default="imgq")
    parser.add_argument("--least", type=float, default=1.25, help="ratio below which the exit code is 1")
    options = parser.parse_args()
    rows = write_workloads(options.folder.resolve() / "data")[options.workload]
    words = ["model=tiny", "dataset=jsonl", f"dataset.train={rows}", "loss=listwise", "tune=full", "gpus=1"]
    words += [f"run.dir={options.folder.resolve() / 'run'}", "batch.global_size=2", "batch.max_tokens=24576"]
    config = read_config(words).config
    shared = make_plan(config, gather_facts(config), now=datetime.now(timezone.utc))
    attention = dataclasses.replace(shared.config.attention, shared_prefix=False)
    apart = dataclasses.replace(shared, config=dataclasses.replace(shared.config, attention=attention))
    processor = processors.load_processor(shared)
    scorer = build_scorer(shared, processor, torch.device("cpu"))
    scorer.train()
    read = prepare(shared, "train", lambda: None)
    sides = {"shared": shared, "apart": apart}
    batches = {name: batches_of(plan, scorer, processor, [read[i] for i in range(2)]) for name, plan in sides.items()}
    took: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for _ in range(WARM_UP + ROUNDS):
        for name, plan in sides.items():
            seconds, losses[name] = step(plan, scorer, batches[name])
            took[name].append(seconds)
    medians = {name: median(values[WARM_UP:]) for name, values in took.items()}
    for name in sides:
        tokens = sum(batch.tokens for batch in batches[name])
        print(f"{options.workload} {name:6}  {tokens:6,} tokens  {medians[name]:.3f} s a step  loss {losses[name]:.6f}")
    ratio, gap = medians["apart"] / medians["shared"], abs(losses["apart"] - losses["shared"])
    print(f"{ratio:.2f} x as fast; losses {gap:.1e} apart")
    return 0 if ratio >= options.least and gap <= 1e-4 * max(1.0, abs(losses["apart"])) else 1


if __name__ == "__main__":
    raise SystemExit(main())
