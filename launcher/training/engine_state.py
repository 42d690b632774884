"""Trainable parameters of a DeepSpeed engine by name: float32 masters and Adam moments, in every ZeRO stage.

The only file that reaches into DeepSpeed's optimizers (0.19.8): stage 0 in float32 is a plain torch
AdamW, stages 1 and 2 (and BF16_Optimizer, stage 1 in bf16) keep one flat partition a group, stage 3
one a sub-group. Functions named `read_*`, `finish_*` and `full_weights` are collective: all ranks
call them, in the same order. The optimizer is torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MASTER = "master"
KINDS = (MASTER, "exp_avg", "exp_avg_sq")


def trainable_parameters(engine: DeepSpeedEngine) -> dict[str, Parameter]:
    """Name -> parameter, for all that train; a shared parameter appears once."""
    return {name: p for name, p in engine.module.named_parameters() if p.requires_grad}


def full_shape(parameter: Parameter) -> tuple[int, ...]:
    """The whole parameter's shape, also where ZeRO-3 left an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def read_state(engine: DeepSpeedEngine, parameter: Parameter, kind: str) -> Tensor:
    """The whole master or moment of one parameter in float32, on every rank; call `prepare` first."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 0:
        tensor = parameter.detach() if kind == MASTER else engine.optimizer.state[parameter][kind]
        return tensor.float()
    if kind == MASTER:
        return safe_get_full_fp32_param(parameter)
    return safe_get_full_optimizer_state(parameter, kind)


def write_state(engine: DeepSpeedEngine, parameter: Parameter, kind: str, value: Tensor) -> None:
    """Set this rank's share of one master or moment from the whole `value`; not collective.

    The weights that the forward pass uses follow in `finish_writing`.
    """
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    stage = engine.zero_optimization_stage()
    if stage == 0:
        target = parameter.data if kind == MASTER else engine.optimizer.state[parameter][kind]
        target.copy_(value)
    elif stage == 3:
        # The `safe_set_full` functions fail under stage 3 when the ranks do not divide the parameter.
        own = _own_partition(parameter, value)
        if kind == MASTER:
            safe_set_local_fp32_param(parameter, own)
        else:
            safe_set_local_optimizer_state(parameter, own, kind)
    elif kind == MASTER:
        safe_set_full_fp32_param(parameter, value)
    else:
        safe_set_full_optimizer_state(parameter, value, kind)


def prepare(engine: DeepSpeedEngine) -> None:
    """Give Adam its state where it has none yet: torch makes it in the first step, as these zeros."""
    adam = _adam(engine)
    fused = adam.param_groups[0].get("fused")
    for flat in _flat_masters(engine):
        if not adam.state.get(flat):
            adam.state[flat] = {
                # Fused kernels want the step beside the parameter, the others want it on the CPU.
                "step": torch.zeros((), dtype=torch.float32, device=flat.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(flat, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(flat, requires_grad=False),
            }
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def adam_step(engine: DeepSpeedEngine) -> int:
    """Updates that Adam has made; fewer than the loop's steps when some were skipped."""
    return max((int(state["step"]) for state in _adam(engine).state.values()), default=0)


def finish_writing(engine: DeepSpeedEngine, step: int) -> None:
    """Set Adam's step and rebuild the forward pass's weights from the masters; collective."""
    for state in _adam(engine).state.values():
        # A tensor for each: with a shared one, every sub-group's update would count for all.
        state["step"] = torch.full_like(state["step"], float(step))
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # partitions what is gathered, or stale copies would stay in use
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()  # gathers the small parameters that stay gathered
    elif stage > 0:
        optimizer.update_lp_params()


def full_weights(engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor | None]]:
    """Every parameter as the forward pass sees it: (name, whole tensor on rank 0's CPU, else None); collective.

    All ranks must run the iterator to its end.
    """
    import deepspeed

    for name, parameter in engine.module.named_parameters():
        sharded = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if sharded else nullcontext():
            value = parameter.detach().to("cpu", copy=True) if dist.get_rank() == 0 else None
        yield name, value


def _adam(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    optimizer: Any = engine.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def _flat_masters(engine: DeepSpeedEngine) -> list[Tensor]:
    if engine.zero_optimization_stage() == 3:  # its parameter groups are empty between steps
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [p for group in _adam(engine).param_groups for p in group["params"]]


def _own_partition(parameter: Any, value: Tensor) -> Tensor:
    size = parameter.ds_tensor.numel()
    start = size * dist.get_rank(group=parameter.ds_process_group)
    own = torch.zeros(size, dtype=value.dtype)
    piece = value.flatten()[start : start + size]  # shorter, or empty, on the last ranks
    own[: piece.numel()] = piece
    return own
