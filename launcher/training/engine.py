"""From a plan to a DeepSpeed engine around a Scorer, and one exact optimizer step of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from launcher.families import FAMILIES
from launcher.spec import RunPlan
from launcher.training import attention, models, processors, scoring, tuning
from launcher.training.batching import MicroBatch
from launcher.training.losses import LOSSES
from launcher.training.runtime import Rank
from launcher.training.timing import Stopwatch


def build_scorer(plan: RunPlan, processor: Any, device: torch.device) -> scoring.Scorer:
    """The plan's model, tuned as asked, with its attention kernel installed; not yet in an engine."""
    ids = processors.token_ids(processor)
    dtype = models.DTYPES[plan.precision]
    sharded = zero_stage(plan) == 3
    special_ids = processors.special_ids(processor.tokenizer)
    model = models.load_model(plan, special_ids, device, partitioned=sharded)
    rows = scoring.answer_rows(model, ids["no"], ids["yes"])
    kernel, reason = attention.choose_kernel(plan.config.attention.name, device, dtype)
    print(f"answer tokens: yes {ids['yes']}, no {ids['no']}")
    print(f"attention: {kernel} ({reason})")
    padded = kernel in ("sdpa", "reference")
    attention.install(model.model, kernel, padded)
    tuning.checkpoint_layers(model.model, plan.checkpointed_layers)
    family = FAMILIES[plan.config.model.family]
    with models.seeded(plan.config.train.seed, device):  # adapters begin equal on every rank
        tuned = tuning.apply_tuning(model, plan.config.tune, family, dtype)
    tower_trains = any(p.requires_grad for p in model.model.visual.parameters())
    scorer = scoring.Scorer(
        tuned,
        rows.to(device),
        train_head=plan.config.tune.head == "full",
        always_see=tower_trains or sharded,
        padded=padded,
    )
    if not any(p.requires_grad for p in scorer.parameters()):
        raise ValueError("nothing trains: every part is frozen")
    return scorer


def make_engine(scorer: scoring.Scorer, plan: RunPlan) -> Any:
    """A DeepSpeed engine with torch's own AdamW, which needs no compiled op.

    One parameter group: the loop sets its learning rate before each step.
    """
    import deepspeed

    optim = plan.config.optim
    trainable = [p for p in scorer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable,
        lr=plan.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    engine, *_ = deepspeed.initialize(
        model=scorer, optimizer=optimizer, model_parameters=trainable, config=plan.deepspeed
    )
    return engine


def optimizer_step(
    engine: Any, plan: RunPlan, batches: Iterable[MicroBatch], count: float, rank: Rank, watch: Stopwatch | None = None
) -> float:
    """One exact optimizer step over this rank's micro-batches; returns its share of the loss.

    Every micro-loss is its sum over the global count, so that the step's gradient is that of one mean over the
    whole batch; DeepSpeed averages over ranks, which the factor takes back. Empty micro-batches run too: every
    rank must make the same collective calls.
    """
    loss = LOSSES[plan.config.loss.name]
    watch = watch or Stopwatch(rank.device)
    engine.train()
    total = torch.zeros((), dtype=torch.float64, device=rank.device)
    for batch in batches:
        with watch.span("forward"):
            batch = batch.to(rank.device)
            scores = engine(batch)
            value = loss.function(scores, batch.labels, batch.group, plan.config.loss) / max(count, 1.0)
        with watch.span("backward"):
            engine.backward(value * engine.dp_world_size)
            total += value.detach()
    with watch.span("optimizer"):
        engine.step()
    return float(total)  # waits for the whole step, which the watch needs before it is read


def zero_stage(plan: RunPlan) -> int:
    """ZeRO stage of the finished DeepSpeed configuration."""
    return int(plan.deepspeed.get("zero_optimization", {}).get("stage", 0))
