"""README.md of an export: what the model is, what it was trained from and on, how well it did. No path of a machine."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launcher.families import PARTS, family_of, instruction_of
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
        f"# {Path(plan.run_dir).name}",
        "",
        f"A fine-tuned {base_name(plan)} that {PURPOSE.get(task, task)}.",
        *(["How to load, serve and check it: [SERVE.md](SERVE.md)."] if (folder / "SERVE.md").is_file() else []),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts),
        "",
        *(_classifier(plan, state) if task == "classify" else []),
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
    kinds = {part: getattr(tune, part) for part in PARTS if hasattr(tune, part)}
    if plan.config.task.name == "classify":
        kinds["head"] = "full, a row of weights a class"  # whatever tune.head says of lm_head
    parts = ", ".join(f"{part} {kind}" for part, kind in kinds.items())
    if "lora" not in (tune.language, tune.vision, tune.projector):
        return parts
    extras = [name for name, on in (("rank-stabilised", tune.use_rslora), ("DoRA", tune.use_dora)) if on]
    how = "merged into the weights" if merged else "this folder holds the adapter alone"
    return f"{parts}; LoRA r {tune.r}, alpha {tune.lora_alpha:g}{''.join(f', {kind}' for kind in extras)}, {how}"


def _classifier(plan: RunPlan, state: dict[str, Any]) -> list[str]:
    """How to ask for a class with transformers alone: none of its classes has this head beside a vision tower."""
    family = family_of(plan.config.model, plan.arch)
    said = plan.config.task.system
    content = [{"type": "text", "text": said}] if family.sees else said
    system = "" if said is None else json.dumps({"role": "system", "content": content}, ensure_ascii=False) + ", "
    code = _SEEING_CLASSIFIER if family.sees else _TEXT_CLASSIFIER
    code = code.replace("@CLASSES@", json.dumps(state.get("classes") or plan.config.task.classes, ensure_ascii=False))
    code = code.replace("@SYSTEM@", system)
    return ["## A class for a row", "", "In this folder:", "", "```python", *code.strip().splitlines(), "```", ""]


_TEXT_CLASSIFIER = """
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

classes = @CLASSES@
tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModel.from_pretrained(".").eval()
head = load_file("head.safetensors")["head.weight"].float()  # [classes, hidden size]

chat = [@SYSTEM@{"role": "user", "content": "a red bicycle"}]
prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
with torch.no_grad():
    hidden = model(**tokenizer(prompt, return_tensors="pt")).last_hidden_state[0, -1].float()
probabilities = (head @ hidden).softmax(dim=0)
print(classes[int(probabilities.argmax())], probabilities.tolist())
"""

_SEEING_CLASSIFIER = """
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoProcessor

classes = @CLASSES@
processor = AutoProcessor.from_pretrained(".")
model = AutoModel.from_pretrained(".").eval()
head = load_file("head.safetensors")["head.weight"].float()  # [classes, hidden size]

# A picture: {"type": "image"} before the text, and images=[...] for the processor, in reading order.
chat = [@SYSTEM@{"role": "user", "content": [{"type": "text", "text": "a red bicycle"}]}]
prompt = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
with torch.no_grad():
    hidden = model(**processor(text=[prompt], return_tensors="pt")).last_hidden_state[0, -1].float()
probabilities = (head @ hidden).softmax(dim=0)
print(classes[int(probabilities.argmax())], probabilities.tolist())
"""


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
    found = {name: value for name, value in last.items() if name.startswith("eval/")}
    return {name: float(value) for name, value in found.items() if value is not None}  # null: it was not finite


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
