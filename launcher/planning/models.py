"""Layer sizes -> module names, parameter counts by part and what a tuning choice trains.

The sizes themselves are read in `shapes`. Counts are exact; a test compares them with transformers. Nothing is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from launcher.errors import Problem
from launcher.families import (
    ALL_LINEAR,
    LORA_PARTS,
    PARTS,
    PUBLISHED,
    lora_pattern,
    matched_modules,
    trains_fully,
)
from launcher.planning.shapes import Linears, Shape, weights
from launcher.spec import RunConfig, TaskConfig, TuneConfig

RERANK = TaskConfig(name="rerank")


def parameter_counts(shape: Shape) -> dict[str, int]:
    """Parameters by part. A tied head has none of its own; what a model lacks has 0."""
    return dict(_parameter_counts(shape))


@functools.lru_cache(maxsize=64)  # hundreds of settings of one model are weighed for a plan
def _parameter_counts(shape: Shape) -> dict[str, int]:
    vocabulary = shape.vocab * shape.hidden
    counts = {
        "language": sum(_decoder_layer(shape, n) for n in range(shape.layers)) + shape.hidden,
        "embeddings": vocabulary,
        "head": 0 if shape.tied else vocabulary,
        "vision": 0,
        "projector": 0,
    }
    v = shape.vision
    if v is None:
        return counts
    norms = 2 * v.hidden if v.kind == "qwen2_5" else 4 * v.hidden  # RMSNorm has no bias
    embedding = v.patch_values * v.hidden + (0 if v.kind == "qwen2_5" else v.hidden) + v.positions * v.hidden
    counts["vision"] = embedding + v.depth * (weights(v.block) + _biases(v.block) + norms)
    merger = weights(v.merger) + _biases(v.merger)
    counts["projector"] = merger + norms // 2 + v.deepstack * (merger + 2 * v.merged)
    return counts


def _decoder_layer(shape: Shape, layer: int) -> int:
    """Parameters of one decoder layer."""
    family, e, d = shape.family, shape.experts, shape.delta
    linears = shape.decoder(layer)
    total = weights(linears) + 2 * shape.hidden
    if e is not None:
        total += shape.expert_weights + e.count * shape.hidden  # and the router
    if d is not None and layer not in shape.attending:
        return total + (2 * d.keys + d.values) * d.kernel + 2 * d.heads + d.head_dim
    projections = {name: widths for name, widths in linears.items() if name.startswith("self_attn")}
    if family.qkv_bias:
        del projections["self_attn.o_proj"]
    biases = _biases(projections) if family.qkv_bias or shape.attention_bias else 0
    return total + biases + (2 * shape.head_dim if family.qk_norm else 0)


def _biases(linears: Linears) -> int:
    return sum(out for _, out in linears.values())


@functools.lru_cache(maxsize=64)
def linear_modules(shape: Shape) -> Linears:
    """Every linear module by its live name, with its input and output width."""
    v, language = shape.vision, shape.family.language
    groups = [(f"{language}.layers.{n}", shape.decoder(n)) for n in range(shape.layers)]
    if v is not None:
        groups += [
            *((f"model.visual.blocks.{n}", v.block) for n in range(v.depth)),
            ("model.visual.merger", v.merger),
            *((f"model.visual.deepstack_merger_list.{n}", v.merger) for n in range(v.deepstack)),
        ]
    names = {f"{prefix}.{name}": widths for prefix, linears in groups for name, widths in linears.items()}
    return {**names, "lm_head": (shape.hidden, shape.vocab)}


@functools.lru_cache(maxsize=256)
def lora_modules(shape: Shape, tune: TuneConfig) -> list[str]:
    """Names of the modules that get adapters."""
    return matched_modules(lora_pattern(shape.family, tune), linear_modules(shape))


def check_targets(shape: Shape, tune: TuneConfig) -> list[Problem]:
    """What is wrong with `tune.target_modules`, judged against the model's real module names."""
    pattern = tune.target_modules
    parts = [part for part in LORA_PARTS if getattr(tune, part) == "lora"]
    lacking = [part for part in parts if part not in shape.family.lora]
    if lacking:
        said = "the model reads text only: it has no"
        return [Problem(f"{said} {p}, and tune.{p}=lora", "", (f"tune.{p}=frozen",)) for p in lacking]
    if pattern in (None, ALL_LINEAR, PUBLISHED) or not parts:
        return []
    modules = linear_modules(shape)
    reached: dict[str, list[str]] = {}
    for name in matched_modules(pattern, modules):
        reached.setdefault(shape.family.part_of(name), []).append(name)
    problems = []
    for part, names in reached.items():
        if part not in parts:
            allow = f"tune.{part}=lora" if part in LORA_PARTS else "tune.target_modules=null"
            text = f"tune.target_modules matches {len(names)} modules of {part}, for example {names[0]},"
            because = f"but tune.{part}={getattr(tune, part)}" if part in LORA_PARTS else "which is never adapted"
            problems.append(Problem(f"{text} {because}", "", (allow,)))
    for part in parts:
        if part not in reached:
            example = next(name for name in modules if shape.family.part_of(name) == part)
            text = f"tune.target_modules matches no module of {part}, and tune.{part}=lora"
            hint = f"(it must match a whole name such as {example})"
            problems.append(Problem(f"{text} {hint}", "", ("tune.target_modules=null", f"tune.{part}=frozen")))
    return problems


def remarks(shape: Shape, config: RunConfig) -> Iterator[str]:
    """What a family does otherwise than one may expect, one sentence each."""
    if shape.experts is not None and config.tune.language == "lora":
        share = shape.layers * shape.expert_weights / parameter_counts(shape)["language"]
        yield (
            f"tune.language=lora adapts no expert: they are three-dimensional parameters, which adapters do not reach, "
            f"and {100 * share:.0f} % of the language model"
        )
    if shape.delta is not None:
        yield (
            f"{shape.family.model_type} has linear-attention layers, whose state would run from one document into the "
            "next: every document is computed whole, with no shared prefix, padded to the longest of its micro-batch; "
            "on GPUs without the package flash-linear-attention these layers run slowly, in plain PyTorch"
        )


def data_problems(shape: Shape, config: RunConfig) -> list[Problem]:
    """What of the data the model cannot read, as far as the names tell."""
    data = config.dataset
    if shape.family.sees or "digits" not in (data.name, data.format):
        return []
    text = f"dataset=digits is made of pictures, and model={config.model.name} reads text only"
    return [Problem(text, "", ("dataset=jsonl dataset.train=FILE", "model=tiny"))]


def head_problems(shape: Shape, tune: TuneConfig, task: TaskConfig) -> list[Problem]:
    """What keeps the head of the task from being tuned as asked."""
    if task.name != "sft" or tune.head != "full" or not shape.tied or tune.language == "full":
        return []
    text = "tune.head=full, but the head of this model is its embeddings (tie_word_embeddings), which tune.language"
    tries = ("tune.head=frozen", "tune.language=full   (then both train)")
    return [Problem(f"{text}={tune.language} keeps frozen", "", tries)]


def trainable_counts(shape: Shape, tune: TuneConfig, task: TaskConfig = RERANK) -> dict[str, int]:
    """Trainable parameters by part: whole parts, adapters of rank r, or those of the task's head."""
    return dict(_trainable_counts(shape, tune, task.name, len(task.classes)))


@functools.lru_cache(maxsize=256)
def _trainable_counts(shape: Shape, tune: TuneConfig, task: str, classes: int) -> dict[str, int]:
    counts = parameter_counts(shape)
    trainable = {part: counts[part] if trains_fully(part, tune) else 0 for part in PARTS}
    modules = linear_modules(shape)
    for name in lora_modules(shape, tune):
        wide = modules[name][1] if tune.use_dora else 0  # DoRA: a length for each output
        trainable[shape.family.part_of(name)] += tune.r * sum(modules[name]) + wide
    if task == "classify":
        trainable["head"] += classes * shape.hidden  # 0 until the rows have told the classes
    elif tune.head == "full":
        trainable["head"] += 2 * shape.hidden if task == "rerank" else counts["head"]
    return trainable


@functools.lru_cache(maxsize=256)
def largest_adapter(shape: Shape, tune: TuneConfig) -> int:
    """Elements of the largest adapter matrix, 0 without LoRA."""
    modules = linear_modules(shape)
    return max((tune.r * max(modules[name]) for name in lora_modules(shape, tune)), default=0)
