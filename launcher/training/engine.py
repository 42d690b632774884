"""From a plan to a DeepSpeed engine around a Scorer, and one exact optimizer step of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from launcher.attention_needs import PADDED
from launcher.errors import ConfigError, Problem, TrainingError
from launcher.families import family_of
from launcher.kernels import fused_layers, kernel_problems
from launcher.spec import OptimConfig, RunPlan
from launcher.training import attention, backbone, heads, models, processors, scoring, tuning, warmstart
from launcher.training.batching import MicroBatch
from launcher.training.direct import Gather, offload_of
from launcher.training.fused import layer
from launcher.training.losses import loss_of
from launcher.training.runtime import Rank
from launcher.training.timing import Stopwatch
from launcher.training.vision_sight import make_sight


def build_scorer(
    plan: RunPlan,
    processor: Any,
    device: torch.device,
    gather: Gather = lambda value: [value],
    *,
    sees: bool = True,
) -> scoring.Scorer:
    """The plan's model, tuned as asked, with its attention kernel installed; not yet in an engine.

    `gather` gives every rank's value where there are several; `sees`: whether any rank may get an image.
    """
    tune, family = plan.config.tune, family_of(plan.config.model, plan.arch)
    # The oldest GPU of the run decides for all: what fused layers gather under ZeRO-3 is gathered by every rank.
    oldest = min(gather(torch.cuda.get_device_capability(device))) if device.type == "cuda" else None
    if problems := kernel_problems(plan.config, family, oldest):
        raise ConfigError(*problems)
    begins = plan.config.model.adapter is not None and plan.resume_from is None  # a checkpoint has newer ones
    adapter = Path(str(plan.config.model.adapter)) if begins else None
    if adapter is not None:
        warmstart.check_settings(adapter, tune)
    ids = processors.token_ids(processor)
    dtype = models.DTYPES[plan.precision]
    sharded = zero_stage(plan) == 3
    kernel, reason = attention.choose_kernel(plan.config.attention.name, device, dtype)  # or refuse, before it loads
    print(f"attention: {kernel} ({reason})")
    special_ids = processors.special_ids(processor)
    few_bits = tune.name == "qlora"
    model = models.load_model(
        plan, special_ids, device, partitioned=sharded, quantized=few_bits, to_device=True, gather=gather
    )
    padded = kernel in PADDED
    language, tower = backbone.language_of(model.model), backbone.tower_of(model.model)
    attention.install(language, tower, kernel, layout_padded=padded, packed=not family.recurrent)
    with models.seeded(plan.config.train.seed, device):  # adapters and heads begin equal on every rank
        tuned = tuning.apply_tuning(model, tune, family, dtype)
        head = heads.make_head(plan, model, ids, device)
    fused, why = fused_layers(plan.config, family, device.type, oldest)
    print(f"decoder layers: {'fused' if fused else 'plain'} ({why})")
    if fused:
        layer.install(language, kernel)
    # After peft, which would make embeddings and patches want gradients: a frozen tower would be differentiated.
    tuning.checkpoint_layers(model.model, plan.checkpointed_layers)
    if adapter is not None:
        warmstart.load_adapter(tuned, adapter, tune, family)
    tower_trains = tower is not None and any(p.requires_grad for p in tower.parameters())
    shards, cache_gib = offload_of(plan.deepspeed) if sharded else None, plan.config.memory.vision_cache_gib
    sight = None if tower is None else make_sight(tower, family, kernel, cache_gib, device, shards=shards)
    return scoring.Scorer(
        tuned,
        head,
        always_see=sees and (tower_trains or sharded),
        padded=padded or family.recurrent,
        sight=sight,
    )


def make_engine(scorer: scoring.Scorer, plan: RunPlan) -> Any:
    """A DeepSpeed engine with torch's own AdamW, which needs no compiled op, or bitsandbytes'.

    The loop sets the learning rate of each parameter group before each step, from the group's `peak`.
    """
    import deepspeed

    family = family_of(plan.config.model, plan.arch)
    if zero_stage(plan) == 3:
        models.mark_leaves(scorer, family)
    groups = tuning.parameter_groups(scorer, family, plan.config.optim, plan.lr)
    trainable = [p for group in groups for p in group["params"]]
    if not trainable:
        raise ValueError("nothing trains: every part is frozen")
    optimizer = _make_optimizer(groups, plan.config.optim)
    engine, *_ = deepspeed.initialize(
        model=scorer, optimizer=optimizer, model_parameters=trainable, config=plan.deepspeed
    )
    language = backbone.language_of(scorer.core)
    if zero_stage(plan) < 3 and hasattr(language.layers[0], "fused"):
        layer.lay_together(language)
    if torch.cuda.is_initialized():
        # Weights that moved leave holes as large as they are, which micro-batches do not always fill again.
        torch.cuda.empty_cache()
    return engine


def _make_optimizer(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    shared: dict[str, Any] = {
        "betas": (optim.betas[0], optim.betas[1]),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    if optim.name == "adamw8bit":
        from bitsandbytes.optim import adamw

        return adamw.AdamW8bit(groups, **shared)
    return torch.optim.AdamW(groups, **shared, fused=True)


def optimizer_step(
    engine: Any, plan: RunPlan, batches: Iterable[MicroBatch], count: float, rank: Rank, watch: Stopwatch | None = None
) -> float:
    """One exact optimizer step over this rank's micro-batches; returns its share of the loss.

    Every micro-loss is its sum over the global count, so that the step's gradient is that of one mean over the
    whole batch; DeepSpeed averages over ranks, which the factor takes back. Empty micro-batches run too: every
    rank must make the same collective calls.
    """
    loss = loss_of(plan.config)
    watch = watch or Stopwatch(rank.device)
    engine.train()
    total = torch.zeros((), dtype=torch.float64, device=rank.device)
    for batch in batches:
        with watch.span("forward"):
            batch = batch.to(rank.device)
            value = loss(engine(batch), batch, plan.config.loss) / max(count, 1.0)
        with watch.span("backward"):
            engine.backward(value * engine.dp_world_size)
            total += value.detach()
    with watch.span("optimizer"):
        _step(engine)
    return float(total)  # waits for the whole step, which the watch needs before it is read


def _step(engine: Any) -> None:
    """DeepSpeed's step; its plain Exception at the lowest loss scale, raised on every rank, says what to do."""
    try:
        engine.step()
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        text = "float16 overflows in every step: its loss scale is at its minimum and cannot fall further"
        tries = ("precision=bf16 or precision=fp32", "python -m launcher check data ...")
        raise TrainingError(Problem(text, tries=tries), title="with this training") from error


def loss_scale(engine: Any) -> float | None:
    """What fp16's losses are multiplied by at present; None in other precisions."""
    return float(engine.optimizer.cur_scale) if engine.fp16_enabled() else None


def zero_stage(plan: RunPlan) -> int:
    """ZeRO stage of the finished DeepSpeed configuration."""
    return int(plan.deepspeed.get("zero_optimization", {}).get("stage", 0))
