"""Rows, steps and micro-batches of a run, as far as they are known when it is planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launcher.arithmetic import steps_per_epoch, total_steps
from launcher.planning.facts import Facts
from launcher.spec import BatchPlan, RunConfig


def plan_batch(config: RunConfig, facts: Facts, max_tokens: int, world_size: int) -> BatchPlan:
    """Rows, steps an epoch and steps of the whole run; None where rows could not be counted."""
    rows, size = train_rows(config, facts), config.batch.global_size
    per_epoch = None if rows is None else steps_per_epoch(rows, size)
    total = config.train.max_steps if per_epoch is None else total_steps(config.train, per_epoch)
    return BatchPlan(
        global_size=size,
        max_tokens=max_tokens,
        train_rows=rows,
        eval_rows=_prepared_rows(facts, "eval", facts.eval_rows),
        steps_per_epoch=per_epoch,
        total_steps=total,
        micro_steps=micro_steps(facts.prepared, size, world_size, max_tokens),
    )


def micro_steps(data: Mapping[str, Any], global_size: int, world_size: int, max_tokens: int) -> int | None:
    """Micro-batches a rank and step, about; None while lengths are not measured."""
    tokens = (data.get("train", {}).get("lengths") or {}).get("mean")
    return None if tokens is None else math.ceil(tokens * global_size / (world_size * max_tokens))


def train_rows(config: RunConfig, facts: Facts) -> int | None:
    """Rows of an epoch, None while they are not counted."""
    rows, limit = facts.train_rows, config.dataset.max_rows
    if rows is not None and limit is not None:
        rows = min(rows, limit)
    return _prepared_rows(facts, "train", rows)


def _prepared_rows(facts: Facts, split: str, counted: int | None) -> int | None:
    """The usable rows of a split that has been prepared, else as many as its files hold."""
    found = facts.prepared.get(split)
    return counted if found is None else found["rows"] - (found["lengths"] or {}).get("too_long", 0)
