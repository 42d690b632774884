"""Division of a global batch over ranks and micro-batches, and data order: properties."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.arithmetic import warmup_steps
from launcher.spec import LossConfig, OptimConfig, TrainConfig
from launcher.training.batching import Unit, split_step
from launcher.training.losses import LOSSES
from launcher.training.schedule import Order, learning_rate

LIMIT = 100
units = st.lists(st.integers(1, LIMIT), max_size=40).map(
    lambda sizes: [Unit(i, (0,), tokens, float(tokens**2)) for i, tokens in enumerate(sizes)]
)


@given(units, st.integers(1, 8))
def test_every_unit_once_within_the_budget_and_equal_micro_steps(made: list[Unit], ranks: int) -> None:
    """K11."""
    split = split_step(made, [1.0] * ranks, LIMIT)
    assert len(split) == ranks
    assert len({len(share) for share in split}) == 1
    everything = [unit for share in split for micro in share for unit in micro]
    assert sorted(everything, key=lambda u: u.index) == made
    assert all(sum(u.tokens for u in micro) <= LIMIT for share in split for micro in share)


@given(units, st.integers(1, 4))
def test_padding_counts_where_every_document_is_a_row_of_its_own(made: list[Unit], ranks: int) -> None:
    rows = [dataclasses.replace(unit, longest=unit.tokens) for unit in made]
    split = split_step(rows, [1.0] * ranks, LIMIT)
    everything = [unit for share in split for micro in share for unit in micro]
    assert sorted(everything, key=lambda u: u.index) == rows
    assert all(len(micro) * max((u.tokens for u in micro), default=0) <= LIMIT for share in split for micro in share)


@given(units, st.integers(1, 8))
def test_few_micro_steps(made: list[Unit], ranks: int) -> None:
    # Any two bins of a greedy division hold more than one budget together, so at most twice the least number.
    least = max(1, -(-sum(u.tokens for u in made) // (LIMIT * ranks)))
    assert len(split_step(made, [1.0] * ranks, LIMIT)[0]) <= 2 * least + 1


def test_costs_are_balanced_in_each_micro_step() -> None:
    rng = np.random.default_rng(0)
    made = [Unit(i, (0,), int(t), float(t) ** 2) for i, t in enumerate(rng.integers(10, 60, 64))]
    split = split_step(made, [1.0] * 4, 200)
    costs = np.array([[sum(u.cost for u in micro) for micro in share] for share in split])  # [rank, micro-step]
    slowest = costs.max(0).sum()  # ranks wait for each other at every micro-step
    assert slowest < 1.1 * costs.sum() / 4


@given(units, st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=6))
def test_unequal_ranks_share_every_unit_within_the_budget(made: list[Unit], speeds: list[float]) -> None:
    split = split_step(made, speeds, LIMIT)
    assert len({len(share) for share in split}) == 1 and len(split) == len(speeds)
    everything = [unit for share in split for micro in share for unit in micro]
    assert sorted(everything, key=lambda u: u.index) == made
    assert all(sum(u.tokens for u in micro) <= LIMIT for share in split for micro in share)


@given(units, st.integers(1, 8), st.floats(0.1, 10))
def test_equal_weights_divide_as_no_weights_do(made: list[Unit], ranks: int, weight: float) -> None:
    assert split_step(made, [weight] * ranks, LIMIT) == plainly(made, ranks)


def plainly(made: list[Unit], ranks: int) -> list[list[list[Unit]]]:
    """The division over ranks of one speed, written for them alone: bins of least cost, alike ones in a micro-step."""
    steps = max(1, -(-sum(u.tokens for u in made) // (ranks * LIMIT)))
    bins: list[list[Unit]] | None = None
    while bins is None:
        bins = [[] for _ in range(ranks * steps)]
        for unit in sorted(made, key=lambda u: (-u.cost, u.index)):
            fits = [b for b in bins if sum(u.tokens for u in b) + unit.tokens <= LIMIT]
            if not fits:
                bins, steps = None, steps + 1
                break
            min(fits, key=lambda b: sum(u.cost for u in b)).append(unit)
    bins.sort(key=lambda b: -sum(u.cost for u in b))
    rows = [bins[i * ranks : (i + 1) * ranks] for i in range(steps)]
    return [[sorted(row[(r + i) % ranks], key=lambda u: u.index) for i, row in enumerate(rows)] for r in range(ranks)]


def test_a_rank_three_times_as_fast_does_three_times_the_work() -> None:
    rng = np.random.default_rng(0)
    made = [Unit(i, (0,), int(t), float(t)) for i, t in enumerate(rng.integers(10, 60, 64))]
    speeds = [3.0, 1.0]
    split = split_step(made, speeds, 200)
    costs = np.array([[sum(u.cost for u in micro) for micro in share] for share in split])  # [rank, micro-step]
    slowest = (costs / np.array(speeds)[:, None]).max(0).sum()
    assert slowest < 1.1 * costs.sum() / 4
    assert costs[0].sum() == pytest.approx(3 * costs[1].sum(), rel=0.1)


@pytest.mark.parametrize("name", ["pointwise", "listwise", "ranknet"])
def test_weights_of_ranks_leave_the_loss_exact(name: str) -> None:
    """One rank against two of weights 3 to 1: sums over counts, and their gradient, in float64."""
    random, loss = torch.Generator().manual_seed(0), LOSSES[name]
    sizes = [2, 5, 3, 8, 4, 2, 6]
    scores = [torch.randn(n, dtype=torch.float64, generator=random) for n in sizes]
    made = [Unit(i, tuple(range(n)), 10 * n, 10.0 * n) for i, n in enumerate(sizes)]
    found = {}
    for speeds in ([1.0], [3.0, 1.0]):
        leaves = [s.clone().requires_grad_() for s in scores]
        total, documents = torch.zeros((), dtype=torch.float64), 0
        split = split_step(made, speeds, LIMIT)
        for share in split:
            for micro in share:
                group = torch.tensor([unit.index for unit in micro for _ in unit.documents])
                labels = torch.tensor([float(d == 0) for unit in micro for d in unit.documents], dtype=torch.float64)
                of_micro = torch.cat([leaves[unit.index] for unit in micro]) if micro else torch.zeros(0)
                total = total + loss.function(of_micro, labels, group, LossConfig(name=name))
                documents += len(of_micro)
        assert documents == sum(sizes) and all(any(share) for share in split)
        value = total / loss.count(documents, len(sizes))
        found[len(speeds)] = (value.detach(), torch.cat(torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(found[1], found[2], rtol=1e-12, atol=1e-12)


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
    """K10, K11: a partial batch is a step of all ranks, and no row is left out."""
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


# Mixtures.


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_sources_get_their_share_and_none_is_dealt_twice_before_it_is_used_up(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 5), min_size=len(sizes), max_size=len(sizes)))
    order = Order(sum(sizes), 4, seed, tuple(sizes), tuple(weights))
    ends = np.cumsum([0, *sizes])
    seen = np.zeros(sum(sizes), dtype=int)
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        assert {order.epoch(step) for step in steps} == {epoch}
        rows = np.concatenate([order.batch(step) for step in steps])
        assert len(rows) == sum(sizes)
        for source, weight in enumerate(weights):
            share = ((rows >= ends[source]) & (rows < ends[source + 1])).sum()
            assert abs(share - weight / sum(weights) * len(rows)) <= 1
        seen += np.bincount(rows, minlength=len(seen))
        for begin, end in zip(ends[:-1], ends[1:], strict=True):
            assert seen[begin:end].max() - seen[begin:end].min() <= 1


def test_mixture_differs_by_epoch_and_seed_and_survives_a_resume() -> None:
    order = Order(64, 16, 1, (32, 32), (3.0, 1.0))
    again = [Order(64, 16, 1, (32, 32), (3.0, 1.0)).batch(step) for step in range(8)]
    assert all((order.batch(step) == again[step]).all() for step in reversed(range(8)))
    assert (order.batch(0) != order.batch(4)).any()
    assert (order.batch(0) != Order(64, 16, 2, (32, 32), (3.0, 1.0)).batch(0)).any()


def test_a_source_left_without_rows_leaves_its_share_to_the_others() -> None:
    order = Order(6, 6, 0, (0, 6), (1.0, 1.0))
    assert sorted(order.batch(0)) == list(range(6))
