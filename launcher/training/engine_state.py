"""Trainable parameters of a DeepSpeed engine by name: float32 masters and Adam moments, in every ZeRO stage.

The only file that reaches into DeepSpeed's optimizers (0.19.8): stage 0 in float32 is a plain torch
AdamW, stages 1 and 2 (and BF16_Optimizer, stage 1 in bf16) keep one flat partition a group, stage 3
one a sub-group, which may lie on a disk between steps. Functions named `read_*`, `finish_*` and `full_weights` are
collective: all ranks call them, in the same order. The optimizer is torch.optim.AdamW, or bitsandbytes' AdamW8bit,
whose moments are float32 between `prepare` and `finish_reading` or `finish_writing` (four times their usual size).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    for group, flat in enumerate(_flat_masters(engine)):
        if hasattr(adam, "init_state"):
            _unpack(adam, flat)
        elif not adam.state.get(flat):
            with _off_the_disk(engine, group):
                adam.state[flat] = {
                    # Fused kernels want the step beside the parameter, the others want it on the CPU.
                    "step": torch.zeros((), dtype=torch.float32, device=flat.device if fused else "cpu"),
                    "exp_avg": torch.zeros_like(flat, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(flat, requires_grad=False),
                }
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed links parameters with their state once, after the first group's first step: with several groups
        # the others have none yet, and would never be found.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def finish_reading(engine: DeepSpeedEngine) -> None:
    """Take back what `prepare` laid out for reading alone."""
    for state in _adam(engine).state.values():
        if "state1" in state:
            del state["exp_avg"], state["exp_avg_sq"]


def adam_step(engine: DeepSpeedEngine) -> int:
    """Updates that Adam has made; fewer than the loop's steps when some were skipped."""
    return max((int(state["step"]) for state in _adam(engine).state.values()), default=0)


def finish_writing(engine: DeepSpeedEngine, step: int) -> None:
    """Set Adam's step and rebuild the forward pass's weights from the masters; collective."""
    for state in _adam(engine).state.values():
        if "state1" in state:
            state["step"] = step
            _pack(state)
        else:
            # A tensor for each: with a shared one, every sub-group's update would count for all.
            state["step"] = torch.full_like(state["step"], float(step))
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # partitions what is gathered, or stale copies would stay in use
        for group in range(len(optimizer.fp16_groups)):
            with _off_the_disk(engine, group):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()  # gathers the small parameters that stay gathered
    elif stage > 0:
        optimizer.update_lp_params()


_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scaler(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Where fp16's dynamic loss scale stands, JSON-ready; empty for other precisions and a fixed scale."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {"loss_scaler": {key: getattr(scaler, key) for key in _SCALE}} if getattr(scaler, "dynamic", False) else {}


def set_loss_scaler(engine: DeepSpeedEngine, saved: dict[str, Any]) -> None:
    """Go on with the loss scale of `loss_scaler`, where both runs have a dynamic one."""
    if loss_scaler(engine):
        for key, value in saved.get("loss_scaler", {}).items():
            setattr(engine.optimizer.loss_scaler, key, value)


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


def _unpack(adam: Any, flat: Tensor) -> None:
    """Moments of AdamW8bit in float32, under AdamW's names; the ones of small tensors are so already."""
    from bitsandbytes.functional import dequantize_blockwise

    state = adam.state[flat]
    if not state:
        groups = adam.param_groups
        adam.param_groups = [{**groups[0], "params": [flat]}]  # it looks itself up there; ZeRO-3 leaves groups empty
        adam.init_state(adam.param_groups[0], flat, 0, 0)
        adam.param_groups = groups
    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        value, constants, code = (state.get(f"{key}{number}") for key in ("state", "absmax", "qmap"))
        if constants is not None:
            value = dequantize_blockwise(value, absmax=constants, code=code, blocksize=256)
        state[name] = value


def _pack(state: dict[str, Any]) -> None:
    from bitsandbytes.functional import quantize_blockwise

    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        value = state.pop(name)
        if f"absmax{number}" in state:
            packed, constants = quantize_blockwise(value, code=state[f"qmap{number}"], blocksize=256)
            state[f"state{number}"], state[f"absmax{number}"] = packed, constants.absmax


def _flat_masters(engine: DeepSpeedEngine) -> list[Tensor]:
    if engine.zero_optimization_stage() == 3:  # its parameter groups are empty between steps
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [p for group in _adam(engine).param_groups for p in group["params"]]


@contextmanager
def _off_the_disk(engine: DeepSpeedEngine, group: int) -> Iterator[None]:
    """A sub-group's master and moments in memory, where `offload_optimizer` keeps them on NVMe: empty otherwise."""
    optimizer: Any = engine.optimizer
    swapped = engine.zero_optimization_stage() == 3 and optimizer._swappable_optimizer_subgroup(group)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(group)
    yield
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_out(group)


def _own_partition(parameter: Any, value: Tensor) -> Tensor:
    size = parameter.ds_tensor.numel()
    start = size * dist.get_rank(group=parameter.ds_process_group)
    own = torch.zeros(size, dtype=value.dtype)
    piece = value.flatten()[start : start + size]  # shorter, or empty, on the last ranks
    own[: piece.numel()] = piece
    return own
