"""What trains: each part of the model is frozen, trained whole, or given LoRA adapters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from launcher.families import Family, lora_pattern, matched_modules, trains_fully
from launcher.spec import TuneConfig

PEFT_PREFIX = "base_model.model."


def apply_tuning(model: Any, tune: TuneConfig, family: Family, dtype: torch.dtype) -> Any:
    """Set `requires_grad` by part and add adapters; returns the model or peft's wrapper of it.

    Adapters take `dtype`, whatever the ZeRO stage: left to peft and DeepSpeed, stage 3 would train them in
    float32 and the other stages not.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    adapted = matched_modules(lora_pattern(family, tune), linears)
    if adapted:
        from peft import LoraConfig, get_peft_model

        sizes = {"r": tune.r, "lora_alpha": tune.lora_alpha, "lora_dropout": tune.lora_dropout}
        model = get_peft_model(model, LoraConfig(target_modules=adapted, **sizes), autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        adapter = ".lora_" in name
        part = family.part_of(name.removeprefix(PEFT_PREFIX))
        parameter.requires_grad_(adapter or trains_fully(part, tune))
        if adapter:
            parameter.data = parameter.data.to(dtype)
    return model


def checkpoint_layers(model: Any, count: int) -> None:
    """Recompute the first `count` decoder layers in the backward pass, and all vision blocks when any."""
    from torch.utils.checkpoint import checkpoint

    again = partial(checkpoint, use_reentrant=False)
    layers = list(model.language_model.layers)[:count] + (list(model.visual.blocks) if count else [])
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = again


def trainable_by_part(scorer: Any, family: Family) -> dict[str, int]:
    """Trainable parameters of each part of a Scorer, of a partitioned one too."""
    counts: dict[str, int] = {}
    for name, parameter in scorer.named_parameters():
        if parameter.requires_grad:
            bare = name.removeprefix("model.").removeprefix(PEFT_PREFIX)
            part = "head" if name == "head" else family.part_of(bare)
            counts[part] = counts.get(part, 0) + int(getattr(parameter, "ds_numel", parameter.numel()))
    return counts
