"""Division of a global batch over ranks and micro-batches, and data order: properties."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.arithmetic import warmup_steps
from launcher.spec import OptimConfig, TrainConfig
from launcher.training.batching import Unit, split_step
from launcher.training.schedule import Order, learning_rate

LIMIT = 100
units = st.lists(st.integers(1, LIMIT), max_size=40).map(
    lambda sizes: [Unit(i, (0,), tokens, float(tokens**2)) for i, tokens in enumerate(sizes)]
)


@given(units, st.integers(1, 8))
def test_every_unit_once_within_the_budget_and_equal_micro_steps(made: list[Unit], ranks: int) -> None:
    split = split_step(made, ranks, LIMIT)
    assert len(split) == ranks
    assert len({len(share) for share in split}) == 1
    everything = [unit for share in split for micro in share for unit in micro]
    assert sorted(everything, key=lambda u: u.index) == made
    assert all(sum(u.tokens for u in micro) <= LIMIT for share in split for micro in share)


@given(units, st.integers(1, 8))
def test_few_micro_steps(made: list[Unit], ranks: int) -> None:
    # Any two bins of a greedy division hold more than one budget together, so at most twice the least number.
    least = max(1, -(-sum(u.tokens for u in made) // (LIMIT * ranks)))
    assert len(split_step(made, ranks, LIMIT)[0]) <= 2 * least + 1


def test_costs_are_balanced_in_each_micro_step() -> None:
    rng = np.random.default_rng(0)
    made = [Unit(i, (0,), int(t), float(t) ** 2) for i, t in enumerate(rng.integers(10, 60, 64))]
    split = split_step(made, 4, 200)
    costs = np.array([[sum(u.cost for u in micro) for micro in share] for share in split])  # [rank, micro-step]
    slowest = costs.max(0).sum()  # ranks wait for each other at every micro-step
    assert slowest < 1.1 * costs.sum() / 4


@settings(max_examples=30)
@given(st.integers(1, 50), st.integers(1, 12), st.integers(0, 3))
def test_each_epoch_holds_every_row_once(rows: int, size: int, seed: int) -> None:
    order = Order(rows, size, seed)
    for epoch in (0, 1):
        first = epoch * order.steps_per_epoch
        seen = np.concatenate([order.batch(first + k) for k in range(order.steps_per_epoch)])
        assert sorted(seen) == list(range(rows))


def test_order_differs_by_epoch_and_seed_and_by_nothing_else() -> None:
    order = Order(64, 64, 1)
    assert (order.batch(0) == Order(64, 64, 1).batch(0)).all()
    assert (order.batch(0) != order.batch(1)).any()
    assert (order.batch(0) != Order(64, 64, 2).batch(0)).any()


def test_steps_of_a_run() -> None:
    order = Order(rows=10, global_size=4, seed=0)  # 4, 4 and 2 rows
    assert order.total_steps(TrainConfig(epochs=2.0)) == 6
    assert order.total_steps(TrainConfig(epochs=0.5)) == 2
    assert order.total_steps(TrainConfig(max_steps=5)) == 5
    assert len(order.batch(2)) == 2


def test_schedules_begin_end_and_floor() -> None:
    for name in ("linear", "cosine", "constant"):
        optim = OptimConfig(schedule=name, warmup_ratio=0.1, min_lr_ratio=0.1)
        warmup = warmup_steps(optim, 50)
        rates = [learning_rate(s, total_steps=50, peak=2.0, warmup_steps=warmup, optim=optim) for s in range(50)]
        assert warmup == 5 and rates[4] == rates[5] == 2.0 and rates[0] == 0.4
        assert min(rates[5:]) >= 0.2 and (name == "constant" or rates[-1] < 0.3)
    assert warmup_steps(dataclasses.replace(OptimConfig(), warmup_steps=7), 50) == 7
