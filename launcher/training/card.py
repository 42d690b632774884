"""README.md of an export: what the model is, what it was trained from and on, how well it did. No path of a machine."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launcher.families import PARTS, instruction_of
from launcher.rundir import RunDir, write_atomic
from launcher.spec import RunPlan

PACKAGES = ("torch", "transformers", "peft", "deepspeed")
PURPOSE = {
    "rerank": "scores how well a document answers a query: the probability of its answer *yes* against *no*",
    "sft": "answers chats",
    "classify": "tells which class a text or picture belongs to",
}
PIPELINE = {"rerank": "text-ranking", "sft": "text-generation", "classify": "text-classification"}


def write_card(folder: Path, plan: RunPlan, state: dict[str, Any], *, merged: bool, notes: list[str]) -> None:
    """Write README.md; `state` is the checkpoint's state.json, `notes` are limits to be named beside the usual ones."""
    task = plan.config.task.name
    facts = [(name, value) for name, value in _facts(plan, state, merged) if value]
    lines = [
        *_front(plan, merged),
        "",
        f"# {plan.run_id}",
        "",
        f"A fine-tuned {base_name(plan)} that {PURPOSE.get(task, task)}.",
        *(["How to load, serve and check it: [SERVE.md](SERVE.md)."] if (folder / "SERVE.md").is_file() else []),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts),
        "",
        *_metrics(plan, state),
        "## Limits",
        "",
        *(f"- {note}" for note in [*notes, *_limits(plan)]),
    ]
    write_atomic(folder / "README.md", "\n".join(lines) + "\n")


def base_name(plan: RunPlan) -> str:
    """The base model's name, without folders of this machine."""
    model = plan.config.model
    if model.weights == "random":
        return f"{model.name} with random weights"
    return Path(model.path).name if model.path else str(model.repo)


def _front(plan: RunPlan, merged: bool) -> list[str]:
    model, task = plan.config.model, plan.config.task.name
    tags = ["reranker", "sentence-transformers", "cross-encoder"] if task == "rerank" else []
    lines = [
        "---",
        f"library_name: {'transformers' if merged else 'peft'}",
        f"pipeline_tag: {PIPELINE.get(task, task)}",
    ]
    if model.weights == "pretrained" and not model.path:
        lines.append(f"base_model: {model.repo}")
    return [*lines, *(["tags:", *(f"- {tag}" for tag in tags)] if tags else []), "---"]


def _facts(plan: RunPlan, state: dict[str, Any], merged: bool) -> list[tuple[str, str]]:
    config, batch = plan.config, plan.batch
    sources = [Path(str(source)).name for source in config.dataset.sources("train")] or [config.dataset.name]
    rows = "" if batch.train_rows is None else f", {batch.train_rows:,} rows"
    best = state.get("best") or {}
    chosen = f", the best by {config.metric}" if best.get("step") == state["step"] else ""
    epochs = f"{state['epoch']:.2f} epochs of " if isinstance(state.get("epoch"), int | float) else ""
    return [
        ("Base model", base_name(plan)),
        ("Training data", f"{', '.join(sources)}{rows}"),
        ("Steps", f"{state['step']:,}{chosen}; {epochs}{batch.global_size} rows a step"),
        ("Task and loss", f"{config.task.name}, {config.loss.name}"),
        ("Instruction", instruction_of(plan) if config.task.name == "rerank" else ""),
        ("Tuning", _tuning(plan, merged)),
        ("Optimizer", f"{config.optim.name}, peak learning rate {plan.lr:g}, {config.optim.schedule} schedule"),
        ("Longest prompt", f"{config.dataset.max_length:,} tokens"),
        ("Number format", plan.precision),
        ("Versions", ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))),
    ]


def _tuning(plan: RunPlan, merged: bool) -> str:
    tune = plan.config.tune
    parts = ", ".join(f"{part} {getattr(tune, part)}" for part in PARTS if hasattr(tune, part))
    if "lora" not in (tune.language, tune.vision, tune.projector):
        return parts
    kinds = [name for name, on in (("rank-stabilised", tune.use_rslora), ("DoRA", tune.use_dora)) if on]
    how = "merged into the weights" if merged else "this folder holds the adapter alone"
    return f"{parts}; LoRA r {tune.r}, alpha {tune.lora_alpha:g}{''.join(f', {kind}' for kind in kinds)}, {how}"


def _metrics(plan: RunPlan, state: dict[str, Any]) -> list[str]:
    found = evaluated(RunDir(Path(plan.run_dir)), state["step"])
    if not found:
        return []
    rows = [f"| {name.removeprefix('eval/')} | {value:.4f} |" for name, value in found.items()]
    sources = [Path(str(source)).name for source in plan.config.dataset.sources("eval")] or [plan.config.dataset.name]
    return ["## Held-out rows", "", f"On {', '.join(sources)}:", "", "| metric | value |", "|---|---|", *rows, ""]


def evaluated(run: RunDir, step: int) -> dict[str, float]:
    """The metrics that a run measured after `step`; empty when it did not."""
    if not run.metrics.is_file():
        return {}
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines() if '"eval/' in line]
    last: dict[str, Any] = next((line for line in reversed(lines) if line.get("step") == step), {})
    return {name: float(value) for name, value in last.items() if name.startswith("eval/")}


def _limits(plan: RunPlan) -> list[str]:
    limits = ["Nothing was tested for other kinds of queries, documents or languages than those of the training data."]
    if plan.config.task.name == "rerank":
        limits.append("Scores order documents of one query; their size differs between models.")
        limits.append("Another prompt than that of the `reranker` chat template gives wrong scores without a warning.")
    return limits


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
