"""Train the same groups under several plans in one process group; rank 0 writes what came out.

usage: RANK=.. WORLD_SIZE=.. python -m tests.processes.zero_cases OUT_FOLDER

Engines are made and destroyed in a running process group, since a start costs more than all cases together.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from launcher.training import processors
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer, make_engine
from launcher.training.engine_state import full_weights
from launcher.training.loop import optimizer_step
from launcher.training.pixels import Pixels
from launcher.training.runtime import Rank, distributed
from launcher.training.steps import StepMaker
from tests.groups import GROUPS
from tests.tiny import tiny_plan

ALL = [one for groups in GROUPS.values() for one in groups]
TEXT_ONE_SIDE = GROUPS["text"] + GROUPS["image documents"]  # in a step of two, one rank sees no image
LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen", "lora_alpha": 16.0}
STEPS = [[0, 1, 2, 3, 4, 5, 6, 7][:n] for n in (8, 5, 1)]  # the last: fewer groups than ranks

BASE = "base"  # folder of the tiny model's weights

# name -> (plan options, micro-batch tokens)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "full, one micro-batch": ({}, 8192),
    "full, small micro-batches": ({}, 300),
    "full, pointwise": ({"loss": {"name": "pointwise"}}, 300),
    "lora": ({"tune": LORA}, 300),
    "lora, recomputed": ({"tune": LORA, "recompute": True}, 300),
    "lora, weights from files": ({"tune": LORA, "files": True}, 300),
    "bf16": ({"bf16": True}, 300),
    "head and projector": (
        {"tune": {"name": "full", "language": "frozen", "vision": "frozen", "projector": "full", "head": "full"}},
        8192,
    ),
}

# (case, ZeRO stage, ranks). Stages 0 and 1 differ from 2 in what is sharded: one case each shows it.
RUNS = [(name, 2, 1) for name in CASES] + [
    (name, stage, 2)
    for stage in range(4)
    for name in CASES
    if stage > 1 or name == "full, small micro-batches" or (name, stage) == ("bf16", 1)
]


def make_case(folder: Path, name: str, stage: int, ranks: int) -> Any:
    """The plan of a case."""
    import dataclasses

    options, max_tokens = CASES[name]
    config = {key: value for key, value in options.items() if key not in ("recompute", "files", "bf16")}
    if options.get("files"):  # under ZeRO-3 they are sharded while they load
        config["model"] = {"weights": "pretrained", "path": str(folder / BASE)}
    plan = tiny_plan(folder, stage=stage, ranks=ranks, max_tokens=max_tokens, **config)
    if options.get("bf16"):
        settings = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        plan = dataclasses.replace(plan, precision="bf16", deepspeed=plan.deepspeed | settings)
    return dataclasses.replace(plan, checkpointed_layers=4 if options.get("recompute") else 0)


def run_case(plan: Any, rank: Rank) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Losses and gradient norms of three steps, and every parameter after them."""
    processor = processors.load_processor(plan)
    engine = make_engine(build_scorer(plan, processor, rank.device), plan)
    pixels = Pixels(processor.image_processor)
    maker = StepMaker(plan, make_encoder(plan, processor), pixels, rank=rank.rank, padded=True, warn=print)
    found: dict[str, list[float]] = {"loss": [], "norm": [], "micro_batches": []}
    for rows in STEPS:
        share = maker.training([ALL[row] for row in rows])
        (count,) = rank.sum(share.units)
        (loss,) = rank.sum(optimizer_step(engine, plan, share.micro_batches, count, rank))
        found["loss"].append(loss)
        found["norm"].append(float(engine.get_global_grad_norm() or 0.0))
        found["micro_batches"].append(len(share.micro_batches))
    weights = {name: value.clone() for name, value in full_weights(engine) if value is not None}
    engine.destroy()
    return found, weights


def main() -> None:
    """Run every case of every stage."""
    out = Path(sys.argv[1])
    world = int(os.environ["WORLD_SIZE"])
    with distributed(tiny_plan(out, ranks=world)) as rank:
        for stage in range(4):
            for name in CASES:
                if (name, stage, world) not in RUNS:
                    continue
                numbers, weights = run_case(make_case(out, name, stage, world), rank)
                if rank.rank == 0:
                    key = f"{name}, stage {stage}, ranks {world}"
                    (out / f"{key}.json").write_text(json.dumps(numbers))
                    save_file({k: v.contiguous() for k, v in weights.items()}, out / f"{key}.safetensors")
                    print(key, numbers, flush=True)
    os._exit(0)  # as a rank of a run leaves: gloo's threads may abort in the interpreter's own end


if __name__ == "__main__":
    main()
