"""Seconds of a step: what `python -m launcher plan` foretells against what was measured.

    python -m tests.bench.speed_runs

Runs of tests/bench/first_runs.py on H200s (RESULTS.md): 4 queries, or chats, a GPU and step, made before there were
fused layers. The constants of launcher/planning/fitted.py for plain ones were fitted on those marked `fit`, and are
judged by the others.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from statistics import fmean

from launcher.estimates import Load, TimeEstimate
from launcher.planning import fitted
from launcher.planning.config import read_config
from launcher.planning.rates import rates_of
from launcher.planning.setting import Setting
from launcher.planning.shapes import read_shape
from launcher.planning.speed import PICTURES, predict
from launcher.resources import ds_configs_dir
from launcher.spec import RunConfig

LORA = ("tune=lora", "tune.r=8")
AGAIN, PLAIN = ("memory.gradient_checkpointing=all",), ("train.kernels=plain",)
# What they took of a micro-batch, of a step, and of each patch, which one thread read while the GPU waited.
MICRO_STEP_S, STEP_S, PICTURE_S = 0.039, 0.02, 1.5e-6
RERANKER, SMALL = "model=qwen3_vl_reranker_8b", "model=qwen3_vl_4b"
# Four rows of each workload of tests/bench/workloads.py, as `check data` counts them.
LOADS = {
    "text": Load(tokens=10690, key_rows=15832, documents=32, pairs=3610971.0),
    "page": Load(
        tokens=16539,
        visual=16128,
        patches=64512,
        key_rows=17799,
        documents=16,
        pairs=9523106.6,
        patch_pairs=260112384.0,
    ),
    "imgq": Load(
        tokens=7622, visual=4032, patches=16128, key_rows=41798, documents=32, pairs=6037633.9, patch_pairs=65028096.0
    ),
    "chat": Load(tokens=15814, documents=4, answers=7891, pairs=31264526.9),
}


@dataclass(frozen=True)
class Run:
    """A run, and the median of its steps."""

    name: str
    workload: str
    words: tuple[str, ...]
    step_s: float
    gpus: int = 1
    stage: str = "stage2"
    micro_steps: int = 1
    fit: bool = False
    queries: int = 0  # of a step; 0: 4 a GPU


RUNS = (
    Run("text, LoRA", "text", (RERANKER, *LORA), 1.00, fit=True),
    Run("page, LoRA", "page", (RERANKER, *LORA), 2.00, micro_steps=2, fit=True),
    Run("imgq, LoRA", "imgq", (RERANKER, *LORA), 0.93),
    Run("text, LoRA, recomputed", "text", (RERANKER, *LORA, *AGAIN), 1.39),
    Run("text, QLoRA, recomputed", "text", (RERANKER, "tune=qlora", "tune.r=8", *AGAIN), 1.44, fit=True),
    Run("chat, LoRA", "chat", ("model=qwen3_vl_8b", *LORA, "task=sft", "loss=cross_entropy"), 1.68),
    Run("page, 4B, all trains", "page", (SMALL, "tune=full", "tune.vision=full", *AGAIN), 3.01, micro_steps=4),
    Run("page, 4B, vision frozen", "page", (SMALL, "tune=full", *AGAIN), 2.09, micro_steps=4, fit=True),
    Run("page, 4B, projector", "page", (SMALL, "tune=full", "tune.language=frozen", *AGAIN), 1.69, micro_steps=4),
    Run("text, LoRA", "text", (RERANKER, *LORA), 1.02, gpus=2),
    Run("text, LoRA", "text", (RERANKER, *LORA), 2.56, gpus=2, stage="stage3", fit=True),
    Run("page, LoRA", "page", (RERANKER, *LORA), 3.24, gpus=2, stage="stage3", micro_steps=2, fit=True),
    Run("imgq, LoRA", "imgq", (RERANKER, *LORA), 2.62, gpus=2, stage="stage3"),
    Run("text, full, recomputed", "text", (RERANKER, "tune=full", *AGAIN), 2.05, gpus=2, stage="stage3", fit=True),
)
# Fused layers, cuDNN, ZeRO-1, LoRA, 16 rows a step: constants for them were fitted on these.
CHAT = ("model=qwen3_vl_8b", *LORA, "task=sft", "loss=cross_entropy")
FUSED_RUNS = tuple(
    Run(f"{workload}, {tokens:,} tokens, fused", workload, words, step_s, 1, "stage1", micro_steps, True, 16)
    for workload, words, tokens, micro_steps, step_s in (
        ("text", (RERANKER, *LORA), 32_768, 2, 2.212),
        ("page", (RERANKER, *LORA), 34_000, 2, 4.314),
        ("imgq", (RERANKER, *LORA), 30_720, 1, 1.838),
        ("chat", CHAT, 32_768, 2, 3.609),
    )
)


# ZeRO-3, the frozen tower gathered at once: medians of steps 2 to 6.
FUSED_RUNS += tuple(
    Run(f"{workload}, {tokens:,} tokens, fused", workload, (RERANKER, *LORA), step_s, 1, "stage3", 1, False, 8)
    for workload, tokens, step_s in (("page", 33_000, 2.37), ("imgq", 15_000, 1.095))
)


@functools.cache
def _config(words: tuple[str, ...]) -> RunConfig:
    return read_config(["dataset=jsonl", "dataset.train=rows.jsonl", *words]).config


def setting_of(
    words: tuple[str, ...], *, gpus: int = 1, stage: str = "stage2", slots: int = 8, queries: int | None = None
) -> Setting:
    """A run on H200s as the planner sees it, by default of 4 queries a GPU."""
    config = _config(words)
    config = replace(config, batch=replace(config.batch, global_size=queries or 4 * gpus))
    shape = read_shape(config.model, config.model.arch)
    return Setting(
        config=config,
        shape=shape,
        deepspeed=json.loads((ds_configs_dir() / f"{stage}.json").read_text()),
        precision="bf16",
        device="cuda",
        gpu_kind="h200",
        capability=(9, 0),
        world=gpus,
        slots=min(slots, gpus),
        checkpointed_layers=shape.layers if AGAIN[0] in words else 0,
        attention="varlen",
    )


def times(load: Load, factor: float) -> Load:
    """A load so many times as large."""
    whole = {name: round(getattr(load, name) * factor) for name in LOAD_COUNTS}
    return replace(load, **whole, pairs=load.pairs * factor, patch_pairs=load.patch_pairs * factor)


LOAD_COUNTS = ("tokens", "visual", "patches", "key_rows", "documents", "answers")


def foretold(run: Run) -> TimeEstimate:
    """What the planner says of a run, with what the engine and the data path of then took more."""
    setting = setting_of((*run.words, *PLAIN), gpus=run.gpus, stage=run.stage)
    load = LOADS[run.workload]
    if run.stage == "stage3":  # the tower was plain then, as it is on GPUs without Triton
        setting = replace(setting, capability=(7, 5))
    if run.stage == "stage3" and not load.patches:
        load = replace(load, patches=4, patch_pairs=16.0)  # a blank picture passed through the tower then
    found = predict(setting, times(load, run.gpus), run.micro_steps, rates_of("h200"))
    more = run.micro_steps * (MICRO_STEP_S - fitted.MICRO_STEP_S) + STEP_S - fitted.STEP_S + load.patches * PICTURE_S
    parts = {name: seconds for name, seconds in found.parts.items() if name != PICTURES}
    return replace(found, step_s=sum(parts.values()) + more)


def foretold_fused(run: Run) -> TimeEstimate:
    """The same of a run with fused layers on one GPU."""
    setting = replace(setting_of(run.words, stage=run.stage, queries=run.queries), attention="cudnn")
    load = times(LOADS[run.workload], run.queries / 4)
    return predict(setting, load, run.micro_steps, rates_of("h200"))


def main() -> None:
    """Print the table."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    print("| run | GPUs | ZeRO | foretold, s | measured, s | difference | used for the fit | bound |")
    print("|---|---|---|---|---|---|---|---|")
    for run in (*RUNS, *FUSED_RUNS):
        found = foretold_fused(run) if run in FUSED_RUNS else foretold(run)
        error = found.step_s / run.step_s - 1
        if run not in FUSED_RUNS:  # all of them were used
            errors[run.fit].append(abs(error))
        cells = (run.name, run.gpus, run.stage[-1], f"{found.step_s:.2f}", f"{run.step_s:.2f}", f"{100 * error:+.1f} %")
        print(f"| {' | '.join(map(str, cells))} | {'yes' if run.fit else ''} | {found.bound} |")
    for fit, said in ((True, "plain layers, used for the fit"), (False, "plain layers, others")):
        print(f"{said}: {100 * fmean(errors[fit]):.1f} % on average, {100 * max(errors[fit]):.1f} % at most")


if __name__ == "__main__":
    main()
