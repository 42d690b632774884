"""LoRA weights by their names: merged into a layer's weight, or written as the folder that peft loads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launcher.errors import ConfigError, Problem
from launcher.families import why_no_adapter
from launcher.spec import RunPlan, TuneConfig
from launcher.training.models import DTYPES
from launcher.training.tuning import PEFT_PREFIX

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_SCORER = "model."
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<part>A|B|magnitude_vector)\.\w+\.weight")
MERGE = "checkpoint.merge=true (export --merge)"


def scaling(tune: TuneConfig) -> float:
    """What B @ A is multiplied with."""
    return tune.lora_alpha / (math.sqrt(tune.r) if tune.use_rslora else tune.r)


def part_of(name: str) -> tuple[str, str] | None:
    """(module, "A" | "B" | "magnitude_vector") of an adapter's parameter in the wrapped model, None for any other.

    Example:
        >>> part_of("model.layers.0.mlp.up_proj.lora_A.default.weight")
        ('model.layers.0.mlp.up_proj', 'A')
    """
    match = _PART.fullmatch(name)
    return (match["module"], match["part"]) if match else None


def merged(weight: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """The weight [out, in] of a layer with its adapter, in float32.

    With a magnitude (DoRA, arXiv 2402.09353) each row is scaled to that length.
    """
    weight = weight + scale * (parts["B"] @ parts["A"])
    if "magnitude_vector" in parts:
        weight = weight * (parts["magnitude_vector"] / weight.norm(dim=1)).unsqueeze(1)
    return weight


def check_exportable(plan: RunPlan) -> None:
    """Raise ConfigError when what was trained is no adapter that somebody else could put on the base model."""
    problems = [Problem(why, "checkpoint.merge=false", (MERGE,)) for why in why_no_adapter(plan.config)]
    if problems:
        raise ConfigError(*problems, title="with this export")


def write(plan: RunPlan, masters: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in the run's number format, and read them back.

    Parts of the model that trained whole go along as peft's `modules_to_save`.
    """
    from peft import LoraConfig

    tune, model = plan.config.tune, plan.config.model
    adapted: set[str] = set()
    whole: set[str] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in masters:
        live = name.removeprefix(_SCORER).removeprefix(PEFT_PREFIX)
        found = part_of(live)
        (adapted if found else whole).add(found[0] if found else live.rpartition(".")[0])
        tensors[_saved_name(live)] = value.to(DTYPES[plan.precision]).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    LoraConfig(
        r=tune.r,
        lora_alpha=tune.lora_alpha,  # type: ignore[arg-type]  # peft divides by it: any number does
        lora_dropout=tune.lora_dropout,
        use_rslora=tune.use_rslora,
        use_dora=tune.use_dora,
        target_modules=sorted(adapted),
        modules_to_save=sorted(whole) or None,
        base_model_name_or_path=model.path or model.repo,
        inference_mode=True,
    ).save_pretrained(str(folder))
    check(folder, adapted)


def _saved_name(live: str) -> str:
    """The key in peft's file.

    Example:
        >>> _saved_name("model.layers.0.up_proj.lora_A.default.weight"), _saved_name("model.merger.norm.bias")
        ('base_model.model.model.layers.0.up_proj.lora_A.weight', 'base_model.model.model.merger.norm.bias')
    """
    found = part_of(live)
    if found is None:
        return f"{PEFT_PREFIX}{live}"
    return f"{PEFT_PREFIX}{found[0]}.lora_{found[1]}" + ("" if found[1] == "magnitude_vector" else ".weight")


def check(folder: Path, adapted: Iterable[str]) -> None:
    """Raise RuntimeError unless every adapted layer has both matrices, whole, and some have left their start."""
    saved = load_file(folder / WEIGHTS)
    moved = False
    for module in adapted:
        a, b = (saved.get(f"{PEFT_PREFIX}{module}.lora_{side}.weight", torch.empty(0)) for side in "AB")
        if not a.numel() or not b.numel() or a.shape[0] != b.shape[1]:
            raise RuntimeError(f"the adapter of {module} was not saved whole: A {list(a.shape)}, B {list(b.shape)}")
        moved = moved or bool(b.any())
    if not moved:
        raise RuntimeError("every lora_B is zero: the adapter changes nothing, so nothing was learned")


def scorer_name(saved: str) -> str:
    """The name in a Scorer of a tensor in peft's file.

    Example:
        >>> scorer_name("base_model.model.model.layers.0.up_proj.lora_A.weight")
        'model.base_model.model.model.layers.0.up_proj.lora_A.default.weight'
    """
    name = re.sub(r"\.lora_([AB])\.weight$", r".lora_\1.default.weight", saved)
    return _SCORER + re.sub(r"\.lora_magnitude_vector$", ".lora_magnitude_vector.default.weight", name)
