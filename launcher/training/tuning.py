"""What trains: each part of the model is frozen, trained whole, or given LoRA adapters."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch

from launcher.arithmetic import peak_rate
from launcher.families import Family, lora_pattern, matched_modules, trains_fully
from launcher.spec import OptimConfig, TuneConfig
from launcher.training.backbone import language_of, tower_of

PEFT_PREFIX = "base_model.model."  # what peft puts before a model's own names


def apply_tuning(model: Any, tune: TuneConfig, family: Family, dtype: torch.dtype) -> Any:
    """Set `requires_grad` by part and add adapters; returns the model or peft's wrapper of it.

    Adapters take `dtype`, whatever the ZeRO stage: left to peft and DeepSpeed, stage 3 would train them in
    float32 and the other stages not.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    adapted = matched_modules(lora_pattern(family, tune), linears)
    if adapted:
        from peft import LoraConfig, get_peft_model

        options: dict[str, Any] = {
            name: getattr(tune, name) for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
        }
        settings = LoraConfig(target_modules=adapted, **options)
        with warnings.catch_warnings():
            # peft asks for it by a name that transformers will drop: nothing that a user could change.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
            model = get_peft_model(model, settings, autocast_adapter_dtype=False)
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
    tower = tower_of(model)
    layers = list(language_of(model).layers)[:count] + (list(tower.blocks) if count and tower is not None else [])
    for layer in layers:
        if hasattr(layer, "fused"):
            layer.fused.recompute = True
            continue
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = again


def part_of(name: str, family: Family) -> str:
    """The part of a Scorer's parameter: of the model, bare or in peft's wrapper, or of its head."""
    return "head" if name.startswith("head.") else family.part_of(name.removeprefix("model.").removeprefix(PEFT_PREFIX))


def trainable_by_part(scorer: Any, family: Family) -> dict[str, int]:
    """Trainable parameters of each part of a Scorer, of a partitioned one too."""
    counts: dict[str, int] = {}
    for name, parameter in scorer.named_parameters():
        if parameter.requires_grad:
            part = part_of(name, family)
            counts[part] = counts.get(part, 0) + int(getattr(parameter, "ds_numel", parameter.numel()))
    return counts


def parameter_groups(scorer: Any, family: Family, optim: OptimConfig, lr: float) -> list[dict[str, Any]]:
    """Trainable parameters of a Scorer for an optimizer: one group for each peak learning rate, in its entry `peak`.

    Equal rates are one group, since each of DeepSpeed's groups has flat buffers of its own.
    """
    groups: dict[float, list[Any]] = {}
    for name, parameter in scorer.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(peak_rate(optim, part_of(name, family), lr), []).append(parameter)
    return [{"params": parameters, "lr": peak, "peak": peak} for peak, parameters in groups.items()]
