"""Train the same groups under several plans in one process group; rank 0 writes what came out.

usage: RANK=.. WORLD_SIZE=.. python -m tests.processes.zero_cases OUT_FOLDER cpu|gpu|hosts cpu|cuda

The second word chooses the cases; those meant for GPUs can be tried on a CPU. Engines are made and destroyed in a
running process group, since a start costs more than all cases together.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from launcher.families import family_of
from launcher.planning.facts import TextFile
from launcher.planning.zero import Trained, finish_zero
from launcher.planning.zero_lint import Settings
from launcher.resources import ds_configs_dir
from launcher.training import processors
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer, make_engine, optimizer_step
from launcher.training.engine_state import full_weights
from launcher.training.evaluate import score_rows
from launcher.training.packed import media_of
from launcher.training.pixels import Pixels
from launcher.training.rows import Content, Group, Image, Video
from launcher.training.runtime import Rank, distributed
from launcher.training.spared import change_imports, spare_imports
from launcher.training.speeds import ROWS, measured_speeds
from launcher.training.steps import StepMaker
from tests.films import film
from tests.groups import GROUPS, group, picture
from tests.processes import memory_states
from tests.tiny import in_family, tiny_arch, tiny_plan

ALL = [one for groups in GROUPS.values() for one in groups]
TEXT_ONE_SIDE = GROUPS["text"] + GROUPS["image documents"]  # in a step of two, one rank sees no image
LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen", "lora_alpha": 16.0}
FUSED = {"train": {"kernels": "fused"}}  # under ZeRO; the plain loop that they are held to has transformers' layers
STEPS = [[0, 1, 2, 3, 4, 5, 6, 7][:n] for n in (8, 5, 1)]  # the last: fewer groups than ranks

SCORED = 5  # groups of the case "lora" that are scored after training: two ranks have other numbers of them (Z12)
BASE = "base"  # folder of the tiny model's weights

# name -> (plan options, micro-batch tokens)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "full, one micro-batch": ({}, 8192),
    "full, small micro-batches": ({}, 300),  # any number of micro-batches has the loss and gradient of one (G04)
    "full, pointwise": ({"loss": {"name": "pointwise"}}, 300),
    # yes and no as answers; the head is the embeddings, which train
    "answers, small micro-batches": ({"task": {"name": "sft"}, "loss": {"name": "cross_entropy"}}, 300),
    "lora": ({"tune": LORA}, 300),
    "lora, recomputed": ({"tune": LORA, "recompute": True, **FUSED}, 300),  # Z07
    "lora, weights from files": ({"tune": LORA, "files": True}, 300),  # Z10: sharded while they load, in stage 3
    # No rank ever runs the tower, whose projector is to train: its weights stay as they are.
    "words alone": ({"tune": {**LORA, "projector": "full"}, "dataset": {"train": "words"}, **FUSED}, 300),
    "bf16": ({"bf16": True}, 300),
    "head and projector": (
        {"tune": {"name": "full", "language": "frozen", "vision": "frozen", "projector": "full", "head": "full"}},
        8192,
    ),
}
# Families whose layers are others; the experts that a rank needs differ from the other's (Z05).
FAMILY_CASES: dict[str, tuple[dict[str, Any], int]] = {
    "windows in the tower": ({"family": "qwen2_5_vl"}, 300),
    "experts": ({"family": "qwen3_vl_moe"}, 300),
    "experts, recomputed": ({"family": "qwen3_vl_moe", "recompute": True}, 300),
    "linear attention, shared expert, lora": ({"family": "qwen3_5_moe", "tune": LORA}, 900),
    "text only": ({"family": "qwen3", **FUSED}, 300),
}

# Text, images and videos in any arrangement over two ranks, the tower trained or frozen (Z01, Z02, Z03, Z04).
MODALITIES = {"train": "modalities", "video": {"fps": 1.0, "min_frames": 2}}
MODALITY_CASES: dict[str, tuple[dict[str, Any], int]] = {
    "modalities": ({"dataset": MODALITIES}, 8192),
    "modalities, frozen tower": ({"dataset": MODALITIES, "tune": LORA, **FUSED}, 8192),
}
# Numbers of `_modalities`. Each rank has one group, rank 0 the longer one: image | text, text | video, text | text,
# image and video | image.
MODALITY_STEPS = [[0, 2], [1, 3], [0, 1], [4, 2]]

# Files of ds_configs/ as a plan finishes them: states in host memory, states in bfloat16.
PRESET_CASES: dict[str, tuple[dict[str, Any], int]] = {
    "stage2_offload": ({"preset": "stage2_offload"}, 300),
    "stage2_offload, lora": ({"preset": "stage2_offload", "tune": LORA}, 300),
    "stage3_offload": ({"preset": "stage3_offload"}, 300),
    "stage3_offload, lora": ({"preset": "stage3_offload", "tune": LORA}, 300),
    "stage2_bf16_states": ({"preset": "stage2_bf16_states", "bf16": True}, 300),
    "stage3_bf16_states": ({"preset": "stage3_bf16_states", "bf16": True}, 300),
}

# Rank 1 is slow at what is measured for weight=auto, and gets less; the copy of the weights that hpZ makes.
RANK_CASES: dict[str, tuple[dict[str, Any], int]] = {
    "a slow rank": ({"measured": True}, 300),
    "a copy on the host": ({"hpz": 2}, 300),
    "a copy on the host, weights from files": ({"hpz": 2, "files": True}, 300),
    "a copy on the host, lora": ({"hpz": 2, "tune": LORA}, 300),
}

# Cases that have nothing of their own in other stages than this, where most can go wrong with them.
ONE_STAGE = {
    "full, one micro-batch": 2,
    "full, pointwise": 2,
    "answers, small micro-batches": 3,
    "lora, recomputed": 3,
    "lora, weights from files": 3,
    "head and projector": 3,
}
ONE_RANK = ("full, one micro-batch", "full, small micro-batches", "lora", "bf16")

# (case, ZeRO stage, ranks). Stages 0 and 1 differ from 2 in what is sharded: one case each shows it.
RUNS = [(name, 2, 1) for name in ONE_RANK] + [
    (name, stage, 2)
    for stage in range(4)
    for name in CASES
    if ONE_STAGE.get(name, stage) == stage
    and (stage > 1 or name == "full, small micro-batches" or (name, stage) == ("bf16", 1))
]
RUNS += [(name, 3, 2) for name in FAMILY_CASES]
RUNS += [("lora, weights from files", 3, 1)]  # Z19: nothing to shard over
RUNS += [(name, stage, 2) for stage in range(4) for name in MODALITY_CASES if stage > 1 or name == "modalities"]
RUNS += [(name, int(name[5]), 2) for name in PRESET_CASES]
RUNS += [("a slow rank", 2, 2), ("a copy on the host, weights from files", 3, 2)]  # the last: its process group stays


# Four ranks as two hosts of two.
HOST_RUNS = [
    (name, 3, 4) for name in ("full, small micro-batches", "lora", "a copy on the host", "a copy on the host, lora")
]

# On GPUs random weights are others than on the CPU, so these begin with the same files.
GPU_CASES: dict[str, tuple[dict[str, Any], int]] = {
    "full, weights from files": ({"files": True}, 300),
    "lora, weights from files": ({"tune": LORA, "files": True}, 300),
    "full, bf16": ({"files": True, "bf16": True}, 300),
    "lora, bf16": ({"tune": LORA, "files": True, "bf16": True}, 300),
}
GPU_RUNS = [
    (name, stage, ranks)
    for ranks in (1, 2)
    for stage in range(4)
    for name in GPU_CASES
    if stage > 0 or "bf16" not in name  # DeepSpeed would add up gradients in bf16 there
]

# Stages compared with one another: (stage, overlap_comm), None = as ds_configs/ has it. Two ranks, bf16.
STAGES: list[tuple[int, bool | None]] = [(1, None), (2, None), (3, None), (2, True), (3, False)]
STAGE_STEPS = [range(8), range(8, 13), range(13, 14)] * 2  # the last of three: fewer groups than ranks
STAGE_LR = [0.0] * 3 + [1e-4] * 3  # the first half on the same weights, so that only the arithmetic differs


OPTIONS = ("recompute", "files", "bf16", "family", "measured", "hpz", "preset")  # what is no key of the configuration


def make_case(folder: Path, name: str, stage: int, ranks: int) -> Any:
    """The plan of a case."""
    options, max_tokens = {**CASES, **FAMILY_CASES, **MODALITY_CASES, **RANK_CASES, **PRESET_CASES, **GPU_CASES}[name]
    config = {key: value for key, value in options.items() if key not in OPTIONS}
    if options.get("files"):  # under ZeRO-3 they are sharded while they load
        config["model"] = {"weights": "pretrained", "path": str(folder / BASE)}
    plan = tiny_plan(folder, stage=stage, ranks=ranks, max_tokens=max_tokens, **config)
    if "family" in options:
        plan = in_family(plan, options["family"])
    if options.get("bf16"):
        plan = in_bf16(plan)
    if "preset" in options:
        plan = dataclasses.replace(plan, deepspeed=preset(options["preset"], plan, ranks))
    if options.get("measured"):
        plan = dataclasses.replace(plan, hosts=(dataclasses.replace(plan.hosts[0], weight="auto"),))
    if options.get("hpz"):
        zero = plan.deepspeed["zero_optimization"] | {"zero_hpz_partition_size": options["hpz"]}
        plan = dataclasses.replace(plan, deepspeed=plan.deepspeed | {"zero_optimization": zero})
    return dataclasses.replace(plan, checkpointed_layers=4 if options.get("recompute") else 0)


def rows_for(plan: Any) -> list[Group]:
    """ALL, in the case "words alone" and for a model without a tower with words in place of the pictures; or every
    modality alone and together."""
    if plan.config.dataset.train == MODALITIES["train"]:
        return _modalities(Path(plan.run_dir))
    if plan.config.dataset.train != "words" and family_of(plan.config.model, plan.arch).sees:
        return ALL

    def told(content: Content) -> Content:
        return tuple("a picture" if isinstance(part, Image) else part for part in content)

    return [dataclasses.replace(g, query=told(g.query), documents=tuple(map(told, g.documents))) for g in ALL]


def _modalities(folder: Path) -> list[Group]:
    video = film(folder / f"film-{os.getpid()}.mp4")
    return [
        group(("what is it",), ("a ring",), ("no ring",)),
        group(("why",), ("because of it " * 60,), ("",), ("a red ring",)),
        group((picture(1), "like this"), (picture(2),), ("text",)),
        group(("which film",), (video,), (Video(video.path, end_s=2.0), "its first half")),
        group((video, picture(3)), (picture(4, 96, 32), video), ("text",)),
    ]


def steps_for(plan: Any) -> list[list[int]]:
    """Numbers of `rows_for` that each step trains on."""
    return MODALITY_STEPS if plan.config.dataset.train == MODALITIES["train"] else STEPS


def preset(name: str, plan: Any, ranks: int) -> dict[str, Any]:
    """A file of ds_configs/, finished by the planner for a plan of so many ranks."""
    file = TextFile(path=f"ds_configs/{name}.json", text=(ds_configs_dir() / f"{name}.json").read_text())
    settings = Settings(world_size=ranks, precision=plan.precision, lr=plan.lr, config=plan.config, slots=(ranks,))
    return finish_zero(file, None, settings, Trained(parameters=10**6, largest_adapter=1000))[0]


def in_bf16(plan: Any) -> Any:
    """The same plan in bf16, gradients added up in float32 as the planner has it."""
    settings = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return dataclasses.replace(plan, precision="bf16", deepspeed=plan.deepspeed | settings)


def stage_case(folder: Path, stage: int, overlap: bool | None, device: str) -> Any:
    """A wider model under ds_configs/stageN.json, its buckets small: many reductions while gradients are computed."""
    width, layers = (1024, 12) if device == "cuda" else (128, 2)
    arch = tiny_arch(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 64,
    )  # fmt: skip
    arch["vision_config"]["out_hidden_size"] = width
    arch["dtype"] = "bfloat16"
    plan = tiny_plan(folder, stage=stage, ranks=2, max_tokens=600)
    zero = json.loads((ds_configs_dir() / f"stage{stage}.json").read_text())["zero_optimization"]
    zero |= {"reduce_bucket_size": 4_000_000, "allgather_bucket_size": 4_000_000}
    zero |= {} if overlap is None else {"overlap_comm": overlap}
    return in_bf16(dataclasses.replace(plan, arch=arch, deepspeed=plan.deepspeed | {"zero_optimization": zero}))


def stage_groups() -> list[Group]:
    """Groups of very different lengths, some with pictures: micro-batches differ in tokens from rank to rank."""
    made = []
    for g in range(14):
        texts = [f"{g} {d} " + "the river and a red door " * (1 + (g * 5 + d * 3) % 11) for d in range(3)]
        documents = [(text,) for text in texts] + ([(picture(g), "of it")] if g % 3 == 0 else [])
        made.append(group((f"query {g}",), *documents))
    return made


def run_case(
    plan: Any,
    rank: Rank,
    groups: Sequence[Group],
    steps: Sequence[Sequence[int]],
    rates: Sequence[float] | None = None,
    scored: int = 0,
) -> tuple[dict[str, Any], Any]:
    """Losses and gradient norms of `steps` (lists of group numbers), and the engine after them.

    After the last step so many groups are scored, as an evaluation does it.
    """
    processor = processors.load_processor(plan)
    sees = any(any(media_of(row)) for row in groups)
    scorer = build_scorer(plan, processor, rank.device, rank.gather, sees=sees)
    padded = scorer.padded
    engine = make_engine(scorer, plan)
    pixels = Pixels(processor)
    found: dict[str, Any] = {"loss": [], "norm": [], "micro_batches": [], "tokens": [], "always_see": scorer.always_see}
    found["speeds"] = measured_speeds(plan, rank, (1, 5)[rank.rank] * ROWS) if plan.measures_speeds else plan.speeds
    maker = StepMaker(
        plan,
        make_encoder(plan, processor),
        pixels,
        rank=rank.rank,
        padded=padded,
        warn=print,
        speeds=found["speeds"],
    )
    for number, rows in enumerate(steps):
        share = maker.training([groups[row] for row in rows])
        (count,) = rank.sum(share.units)
        for part in engine.optimizer.param_groups if rates else ():
            part["lr"] = rates[number]
        (loss,) = rank.sum(optimizer_step(engine, plan, share.micro_batches, count, rank))
        found["loss"].append(loss)
        found["norm"].append(float(engine.get_global_grad_norm() or 0.0))
        found["micro_batches"].append(len(share.micro_batches))
        found["tokens"].append(rank.gather([batch.tokens for batch in share.micro_batches]))
    adam = getattr(engine.optimizer, "optimizer", engine.optimizer)  # beneath ZeRO's own
    found["moments"] = sorted({str(state["exp_avg"].dtype) for state in adam.state.values() if "exp_avg" in state})
    if scored:
        outputs = score_rows(engine, maker, groups[:scored], rank)
        assert outputs is not None
        found["scores"] = [list(outputs.records[row].scores) for row in range(scored)]
    return found, engine


def run_all(out: Path, rank: Rank, cases: str, device: str) -> None:
    """Numbers and every parameter of each case, written by rank 0."""
    world = rank.world_size
    for name, stage, ranks in {"cpu": RUNS, "gpu": GPU_RUNS, "hosts": HOST_RUNS}[cases]:
        if ranks != world:
            continue
        plan = dataclasses.replace(make_case(out, name, stage, world), device=device)
        scored = SCORED if name == "lora" else 0
        numbers, engine = run_case(plan, rank, rows_for(plan), steps_for(plan), scored=scored)
        weights = {name: value.clone() for name, value in full_weights(engine) if value is not None}
        engine.destroy()
        if rank.rank == 0:
            key = f"{name}, stage {stage}, ranks {world}"
            (out / f"{key}.json").write_text(json.dumps(numbers))
            save_file({k: v.contiguous() for k, v in weights.items()}, out / f"{key}.safetensors")
            print(key, numbers, flush=True)


def compare_stages(out: Path, rank: Rank, device: str) -> None:
    """Losses and gradient norms of every entry of STAGES in stages.json; what DeepSpeed refuses, as its text."""
    groups, found = stage_groups(), []
    for stage, overlap in STAGES:
        plan = dataclasses.replace(stage_case(out, stage, overlap, device), device=device)
        numbers, engine = run_case(plan, rank, groups, STAGE_STEPS, STAGE_LR)
        engine.destroy()
        del engine
        gc.collect()
        overlap = plan.deepspeed["zero_optimization"]["overlap_comm"]
        found.append({"stage": stage, "overlap_comm": overlap, **numbers})
        print(found[-1], flush=True)
    try:
        run_case(dataclasses.replace(stage_case(out, 1, True, device), device=device), rank, groups, [])
    except AssertionError as error:
        found.append({"stage": 1, "overlap_comm": True, "refused": str(error)})
    if rank.rank == 0:
        (out / "stages.json").write_text(json.dumps(found))


def main() -> None:
    """Run every case of this number of ranks."""
    out, cases, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    world = int(os.environ["WORLD_SIZE"])
    plan = dataclasses.replace(tiny_plan(out, ranks=world), device=device)
    spare_imports(plan)
    change_imports(plan)
    with distributed(plan) as rank:
        patience = rank.cpu_group._get_backend(torch.device("cpu")).options._timeout
        assert patience >= timedelta(minutes=30), patience  # N08: what a rank that reads for long is waited for
        if cases == "cpu":
            memory_states.run(out, rank)
        run_all(out, rank, cases, device)
        if cases == "gpu" and world == 2:
            compare_stages(out, rank, device)
    os._exit(0)  # as a rank of a run leaves: gloo's threads may abort in the interpreter's own end


if __name__ == "__main__":
    main()
