"""config.json -> layer sizes, module names, parameter counts by part and what a tuning choice trains.

Counts are exact; a test compares them with transformers. Nothing is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.families import FAMILIES, LORA_PARTS, PARTS, Family, lora_pattern, matched_modules, trains_fully
from launcher.spec import ModelConfig, TuneConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """Sizes of the vision tower and its projector."""

    depth: int
    hidden: int
    intermediate: int
    out_hidden: int
    patch_values: int  # numbers of one patch: channels x frames x side x side
    merge: int  # patches of one visual token: merge x merge
    positions: int
    deepstack: int  # feature maps handed to early decoder layers

    @property
    def merged(self) -> int:
        """Width of the patches of one visual token side by side."""
        return self.hidden * self.merge**2

    @property
    def block(self) -> int:
        """Parameters of one vision block."""
        h, i = self.hidden, self.intermediate
        return 4 * h * h + 4 * h + 2 * h * i + i + h + 4 * h

    @property
    def merger(self) -> int:
        """Parameters of the two linear layers of one merger."""
        return self.merged**2 + self.merged + self.merged * self.out_hidden + self.out_hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a model."""

    family: Family
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    vision: VisionShape

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matmul(self) -> int:
        """Weights of one decoder layer that multiply every token."""
        return 2 * self.hidden * (self.q_width + self.kv_width) + 3 * self.hidden * self.intermediate


def read_shape(model: ModelConfig, arch: dict[str, Any]) -> Shape:
    """Sizes from `arch`, which has the structure of config.json; missing or odd values are one ConfigError."""
    where = f"{model.path}/config.json" if model.path else "model.arch"
    family = FAMILIES.get(model.family)
    problems: list[Problem] = []
    if family is None:
        known = ", ".join(FAMILIES)
        raise ConfigError(Problem(f"model.family={model.family} is not known here: {known}", "", ("model=tiny",)))
    if arch.get("model_type", family.model_type) != family.model_type:
        text = f"model_type is {arch['model_type']}, but model.family={model.family} needs {family.model_type}"
        raise ConfigError(Problem(text, where, ("model.path=FOLDER of a Qwen3-VL model",)))

    def number(section: str, key: str) -> int:
        value = (arch.get(section) or {}).get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "missing" if value is None else repr(value)
            problems.append(Problem(f"{section}.{key} is {found}, but must be a whole number above 0", where))
            return 1
        return value

    text, vision = "text_config", "vision_config"
    patch = number(vision, "patch_size")
    depth, layers = number(vision, "depth"), number(text, "num_hidden_layers")
    deepstack = (arch.get(vision) or {}).get("deepstack_visual_indexes") or []
    if any(not isinstance(i, int) or not 0 <= i < depth for i in deepstack) or len(deepstack) > layers:
        text_ = f"vision_config.deepstack_visual_indexes {list(deepstack)} must lie below depth {depth}"
        problems.append(Problem(f"{text_} and be at most {layers}, the decoder layers", where))
    shape = Shape(
        family=family,
        hidden=number(text, "hidden_size"),
        intermediate=number(text, "intermediate_size"),
        layers=layers,
        heads=number(text, "num_attention_heads"),
        kv_heads=number(text, "num_key_value_heads"),
        head_dim=number(text, "head_dim"),
        vocab=number(text, "vocab_size"),
        # Qwen3-VL obeys the top-level key only; the one in text_config is ignored by transformers.
        tied=bool(arch.get("tie_word_embeddings", False)),
        vision=VisionShape(
            depth=depth,
            hidden=number(vision, "hidden_size"),
            intermediate=number(vision, "intermediate_size"),
            out_hidden=number(vision, "out_hidden_size"),
            patch_values=number(vision, "in_channels") * number(vision, "temporal_patch_size") * patch**2,
            merge=number(vision, "spatial_merge_size"),
            positions=number(vision, "num_position_embeddings"),
            deepstack=len(deepstack),
        ),
    )
    if shape.vision.out_hidden != shape.hidden:
        text_ = f"vision_config.out_hidden_size is {shape.vision.out_hidden}, but must be {shape.hidden}"
        problems.append(Problem(f"{text_}, the language model's hidden_size", where))
    if problems:
        raise ConfigError(*problems)
    return shape


def parameter_counts(shape: Shape) -> dict[str, int]:
    """Parameters by part. A tied head has none of its own."""
    v = shape.vision
    layer = shape.layer_matmul + 2 * shape.hidden + 2 * shape.head_dim
    vocabulary = shape.vocab * shape.hidden
    return {
        "language": shape.layers * layer + shape.hidden,
        "embeddings": vocabulary,
        "head": 0 if shape.tied else vocabulary,
        "vision": v.patch_values * v.hidden + v.hidden + v.positions * v.hidden + v.depth * v.block,
        "projector": v.merger + 2 * v.hidden + v.deepstack * (v.merger + 2 * v.merged),
    }


def linear_modules(shape: Shape) -> dict[str, tuple[int, int]]:
    """Every linear module by its live name, with its input and output width."""
    h, i, q, kv = shape.hidden, shape.intermediate, shape.q_width, shape.kv_width
    decoder = {
        "self_attn.q_proj": (h, q),
        "self_attn.k_proj": (h, kv),
        "self_attn.v_proj": (h, kv),
        "self_attn.o_proj": (q, h),
        "mlp.gate_proj": (h, i),
        "mlp.up_proj": (h, i),
        "mlp.down_proj": (i, h),
    }
    v = shape.vision
    block = {
        "attn.qkv": (v.hidden, 3 * v.hidden),
        "attn.proj": (v.hidden, v.hidden),
        "mlp.linear_fc1": (v.hidden, v.intermediate),
        "mlp.linear_fc2": (v.intermediate, v.hidden),
    }
    merger = {"linear_fc1": (v.merged, v.merged), "linear_fc2": (v.merged, v.out_hidden)}
    groups = [
        *((f"model.language_model.layers.{n}", decoder) for n in range(shape.layers)),
        *((f"model.visual.blocks.{n}", block) for n in range(v.depth)),
        ("model.visual.merger", merger),
        *((f"model.visual.deepstack_merger_list.{n}", merger) for n in range(v.deepstack)),
    ]
    names = {f"{prefix}.{name}": widths for prefix, linears in groups for name, widths in linears.items()}
    return {**names, "lm_head": (h, shape.vocab)}


def lora_modules(shape: Shape, tune: TuneConfig) -> list[str]:
    """Names of the modules that get adapters."""
    return matched_modules(lora_pattern(shape.family, tune), linear_modules(shape))


def check_targets(shape: Shape, tune: TuneConfig) -> list[Problem]:
    """What is wrong with `tune.target_modules`, judged against the model's real module names."""
    pattern = tune.target_modules
    parts = [part for part in LORA_PARTS if getattr(tune, part) == "lora"]
    if pattern is None or not parts:
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


def trainable_counts(shape: Shape, tune: TuneConfig) -> dict[str, int]:
    """Trainable parameters by part: whole parts, adapters of rank r, or the head's own two rows."""
    counts = parameter_counts(shape)
    trainable = {part: counts[part] if trains_fully(part, tune) else 0 for part in PARTS}
    modules = linear_modules(shape)
    for name in lora_modules(shape, tune):
        trainable[shape.family.part_of(name)] += tune.r * sum(modules[name])
    if tune.head == "full":
        trainable["head"] += 2 * shape.hidden
    return trainable


def largest_adapter(shape: Shape, tune: TuneConfig) -> int:
    """Elements of the largest adapter matrix, 0 without LoRA."""
    modules = linear_modules(shape)
    return max((tune.r * max(modules[name]) for name in lora_modules(shape, tune)), default=0)
