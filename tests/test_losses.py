"""Losses against the obvious loop in float64, value and gradient; and that sums add up over splits."""

from __future__ import annotations

import math

import pytest
import torch

from launcher.spec import LossConfig
from launcher.training.losses import LOSSES

SCORES = [1.2, -0.3, 0.4, 2.0, -1.0, 0.1, 0.0]
LABELS = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
GROUP = [3, 3, 3, 5, 5, 5, 5]
CONFIG = LossConfig(name="any", temperature=0.5, positive_weight=2.0)


def obvious(name: str, scores: list[float]) -> float:
    if name == "pointwise":
        sigmoid = [1 / (1 + math.exp(-s)) for s in scores]
        return sum(-2 * math.log(p) if y else -math.log(1 - p) for p, y in zip(sigmoid, LABELS, strict=True))
    total = 0.0
    for one in sorted(set(GROUP)):
        members = [i for i, g in enumerate(GROUP) if g == one]
        top = sum(math.exp(scores[i] / 0.5) for i in members)
        positives = [i for i in members if LABELS[i]]
        total -= sum(math.log(math.exp(scores[i] / 0.5) / top) for i in positives) / len(positives)
    return total


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(name: str) -> None:
    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    loss = LOSSES[name].function(scores, torch.tensor(LABELS, dtype=torch.float64), torch.tensor(GROUP), CONFIG)
    assert float(loss.detach()) == pytest.approx(obvious(name, SCORES), rel=1e-12)
    loss.backward()
    for i in range(len(SCORES)):
        ends = [obvious(name, [s + (d if j == i else 0) for j, s in enumerate(SCORES)]) for d in (1e-6, -1e-6)]
        assert float(scores.grad[i]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_groups_apart_add_up(name: str) -> None:
    rows = [torch.tensor(x) for x in (SCORES, LABELS, GROUP)]
    whole = LOSSES[name].function(*rows, CONFIG)
    parts = [LOSSES[name].function(*(r[a:b] for r in rows), CONFIG) for a, b in ((0, 3), (3, 7), (7, 7))]
    torch.testing.assert_close(sum(parts), whole)


def test_the_count_is_the_losses_own_unit() -> None:
    assert LOSSES["pointwise"].count(documents=7, groups=2) == 7
    assert LOSSES["listwise"].count(documents=7, groups=2) == 2
