"""Random weights of a model that no GPU holds whole: made module by module, and sharded at once.

A module's weights are a function of the seed, its name and the kind of device, and of nothing that was made before: so
they are equal on all ranks, whatever their number, and no rank has to make those of others first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from launcher.arithmetic import MOST_WHOLE
from launcher.training.direct import buffers_to, offload_of, replace, sharder, shards_on

__all__ = ["MOST_WHOLE", "fill"]


def fill(
    model: Any,
    device: torch.device,
    *,
    seed: int,
    deepspeed: Mapping[str, Any] | None = None,
    rests_on: torch.device | None = None,
) -> Any:
    """Give a model from `direct.structure` its weights, by transformers' own rules for each kind of module.

    They are made on `device`, and stay there, or `rests_on` another, or as a shard of `deepspeed`'s.
    """
    shard = sharder(deepspeed) if deepspeed else None
    rests_on = shards_on(deepspeed, device) if deepspeed else rests_on or device
    if deepspeed and offload_of(deepspeed) == "nvme":
        rests_on = torch.device("cpu")
    new: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    owners = {"": model}  # the models within the model, each with rules of its own
    for name, module in model.named_modules():
        if hasattr(module, "_init_weights"):
            owners[name] = module
        own = [old for old in module.parameters(recurse=False) if old not in new]
        if not own:
            continue
        whole = {old: torch.nn.Parameter(torch.full_like(old, float("nan"), device=device)) for old in own}
        new |= whole
        replace(module, new, recurse=False)
        _initialize(owners[_owner(name, owners)], model, name, device, seed)
        for parameter in whole.values():
            parameter.data = parameter.data.to(rests_on)
            if shard is not None:
                shard(parameter)
    replace(model, new)
    buffers_to(model, device if shard is not None else rests_on)
    return model


def _initialize(owner: Any, model: Any, name: str, device: torch.device, seed: int) -> None:
    """By the module's own rule, else by that of the module it is in, which is where routers of experts have theirs."""
    module = model.get_submodule(name)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        owner._init_weights(module)
        if not _complete(module):
            owner._init_weights(model.get_submodule(name.rpartition(".")[0]))
    if not _complete(module):
        raise RuntimeError(f"transformers has no initial values for {name} ({type(module).__name__})")


def _complete(module: Any) -> bool:
    parameters = [p.detach() for p in module.parameters(recurse=False) if p.device.type != "meta"]
    return all(bool(parameter.isfinite().all()) for parameter in parameters)


def _owner(name: str, owners: Mapping[str, Any]) -> str:
    """The innermost of the models that hold a module."""
    return max((prefix for prefix in owners if not prefix or f"{name}.".startswith(f"{prefix}.")), key=len)
