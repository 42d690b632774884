"""Losses against the obvious loop in float64 and against sentence-transformers; sums over splits; a user's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.cross_encoder import CrossEncoder
from sentence_transformers.cross_encoder import losses as st
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss
from torch import nn

from launcher.errors import ConfigError
from launcher.spec import LossConfig, RunConfig, TaskConfig
from launcher.training.losses import LOSSES, Loss, loss_of

SCORES = [1.2, -0.3, 0.4, 2.0, -1.0, 0.1, 0.0, 0.7]
LABELS = [1.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 1.0]  # a grade among them; the last group has no pair
TEACHER = [3.0, -1.0, 2.5, 0.5, 0.7, -2.0, 0.0, 1.0]
GROUP = [3, 3, 3, 5, 5, 5, 5, 4]
CONFIG = LossConfig(name="any", temperature=0.5, positive_weight=2.0, margin=1.3)
OF_GROUPS = ("listwise", "ranknet", "margin", "margin_mse", "kl")


def call(loss: Loss, scores: torch.Tensor, rows: Any = slice(None), config: LossConfig = CONFIG) -> torch.Tensor:
    kind = scores.dtype
    told = {"labels": torch.tensor(LABELS, dtype=kind), "scores": torch.tensor(TEACHER, dtype=kind)}
    told["group"] = torch.tensor(GROUP)
    return loss.function(scores[rows], *(told[name][rows] for name in loss.targets), config)


def obvious(name: str, s: list[float]) -> float:
    if name == "pointwise":
        sigmoid = [1 / (1 + math.exp(-x)) for x in s]
        return sum(-2 * math.log(p) if y else -math.log(1 - p) for p, y in zip(sigmoid, LABELS, strict=True))
    return sum(of_group(name, s, [i for i, g in enumerate(GROUP) if g == one]) for one in set(GROUP))


def of_group(name: str, s: list[float], members: list[int]) -> float:
    def shares(values: list[float]) -> dict[int, float]:
        top = {i: math.exp(values[i] / 0.5) for i in members}
        return {i: top[i] / sum(top.values()) for i in members}

    if name == "listwise":
        total = sum(LABELS[i] for i in members)
        return -sum(LABELS[i] / total * math.log(shares(s)[i]) for i in members)
    if name == "kl":
        p, q = shares(TEACHER), shares(s)
        return 0.25 * sum(p[i] * math.log(p[i] / q[i]) for i in members)
    cost: dict[str, Callable[[int, int], float]] = {
        "ranknet": lambda a, b: math.log(1 + math.exp(s[b] - s[a])),
        "margin": lambda a, b: max(0.0, 1.3 - s[a] + s[b]),
        "margin_mse": lambda a, b: ((s[a] - s[b]) - (TEACHER[a] - TEACHER[b])) ** 2,
    }
    pairs = [cost[name](a, b) for a in members for b in members if LABELS[a] > LABELS[b]]
    return sum(pairs) / max(len(pairs), 1)


@pytest.mark.parametrize("name", ["pointwise", *OF_GROUPS])
def test_value_and_gradient(name: str) -> None:
    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    loss = call(LOSSES[name], scores)
    assert float(loss.detach()) == pytest.approx(obvious(name, SCORES), rel=1e-12)
    loss.backward()
    assert scores.grad is not None and scores.grad.abs().sum() > 0.1
    for i in range(len(SCORES)):
        ends = [obvious(name, [s + (d if j == i else 0) for j, s in enumerate(SCORES)]) for d in (1e-6, -1e-6)]
        assert float(scores.grad[i]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-8)
    assert float(call(LOSSES[name], scores.detach().float())) == pytest.approx(obvious(name, SCORES), rel=1e-6)


@pytest.mark.parametrize("name", ["pointwise", *OF_GROUPS])
def test_groups_apart_and_documents_in_any_order_add_up(name: str) -> None:
    """R09."""
    scores = torch.tensor(SCORES, requires_grad=True)
    whole = call(LOSSES[name], scores)
    parts = [call(LOSSES[name], scores, slice(a, b)) for a, b in ((0, 3), (3, 7), (7, 8), (8, 8))]
    torch.testing.assert_close(sum(parts), whole)
    assert parts[-1].requires_grad  # an empty micro-batch runs backward too
    torch.testing.assert_close(call(LOSSES[name], scores, torch.tensor([6, 0, 3, 7, 2, 4, 1, 5])), whole)


@pytest.mark.parametrize("name", ["pointwise", *OF_GROUPS])
def test_far_apart_scores_stay_finite(name: str) -> None:
    scores = torch.tensor([1e4 * s for s in SCORES], requires_grad=True)
    loss = call(LOSSES[name], scores)
    loss.backward()
    assert math.isfinite(loss.detach()) and scores.grad is not None and scores.grad.isfinite().all()


def test_several_positives_share_and_no_positive_costs_nothing() -> None:
    """R10."""
    scores, group = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0, 0, 0])
    one, other, both = (torch.tensor(x) for x in ([1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, 0]))
    listwise = LOSSES["listwise"].function
    mean = (listwise(scores, one, group, CONFIG) + listwise(scores, other, group, CONFIG)) / 2
    torch.testing.assert_close(listwise(scores, both, group, CONFIG), mean)
    assert listwise(scores, torch.zeros(3), group, CONFIG) == 0


def test_chats_and_classes() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    numbers = torch.tensor([0.0, 2.0, 1.0, 1.0])  # class numbers travel as float32 labels
    wanted = -sum(logits[i].softmax(0)[int(n)].log() for i, n in enumerate(numbers))
    torch.testing.assert_close(LOSSES["classify"].function(logits, numbers, CONFIG), wanted)
    assert LOSSES["classify"].function(logits[:0], numbers[:0], CONFIG) == 0
    assert LOSSES["sft"].function(torch.tensor([1.5, 0.5]), CONFIG) == 2.0


def config(loss: LossConfig, task: str = "rerank") -> RunConfig:
    return RunConfig(task=TaskConfig(name=task), loss=loss)


def test_the_loss_of_a_run_and_what_it_counts() -> None:
    named = {
        ("pointwise", "ranknet", "rerank"): ("pointwise", 7),
        ("listwise", "ranknet", "rerank"): ("listwise", 2),
        ("pairwise", "margin", "rerank"): ("margin", 2),
        ("distill", "kl", "rerank"): ("kl", 2),
        ("cross_entropy", "ranknet", "sft"): ("sft", 30),
        ("cross_entropy", "ranknet", "classify"): ("classify", 7),
    }
    for (name, form, task), (wanted, count) in named.items():
        found = loss_of(config(LossConfig(name=name, form=form), task))
        assert found is LOSSES[wanted]
        assert found.count(documents=7, groups=2, answers=30) == count
        assert found.whole_groups is (wanted in OF_GROUPS)


# sentence-transformers' losses, given our scores by a model that answers with them.


class Answers(CrossEncoder):
    """Its "documents" are numbers of the scores it gives."""

    num_labels, device = 1, torch.device("cpu")

    def __init__(self, scores: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.scores = scores

    def preprocess(self, pairs: list[Any], **_: Any) -> dict[str, torch.Tensor]:
        return {"rows": torch.tensor([int(document) for _, document in pairs])}

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"scores": self.scores[inputs["rows"]]}


PLAIN = LossConfig(name="any", temperature=1.0)


def theirs(name: str, scores: torch.Tensor) -> torch.Tensor:
    """The sum of sentence-transformers' loss over groups of one to four documents."""
    model = Answers(scores)
    rows = {one: [i for i, g in enumerate(GROUP) if g == one] for one in dict.fromkeys(GROUP)}
    labels = [torch.tensor([LABELS[i] for i in members]) for members in rows.values()]
    queries, documents = [str(one) for one in rows], [[str(i) for i in members] for members in rows.values()]
    if name == "pointwise":
        everything = [[str(g) for g in GROUP], [str(i) for i in range(len(GROUP))]]
        return st.BinaryCrossEntropyLoss(model)(everything, torch.tensor(LABELS).clamp(max=1)) * len(GROUP)
    if name == "listwise":  # theirs takes the softmax of the labels for a target
        return st.ListNetLoss(model)([queries, documents], [y.log() for y in labels]) * len(rows)
    if name == "ranknet":
        one = [st.RankNetLoss(model, reduction_log="natural")([[q], [d]], [y])
               for q, d, y in zip(queries, documents, labels, strict=True)]  # fmt: skip
        return torch.stack(one).sum()
    positive, *negatives = rows[5]
    columns = [["5"], [str(positive)], *([str(i)] for i in negatives)]
    return st.MarginMSELoss(model)(columns, torch.tensor([[TEACHER[i] for i in rows[5]]]))


@pytest.mark.parametrize("name", ["pointwise", "listwise", "ranknet", "margin_mse"])
def test_sentence_transformers_agrees(name: str) -> None:
    scores = torch.tensor(SCORES, requires_grad=True)
    rows = slice(3, 7) if name == "margin_mse" else slice(None)  # theirs takes one positive
    ours, wanted = call(LOSSES[name], scores, rows, PLAIN), theirs(name, scores)
    torch.testing.assert_close(ours, wanted)
    gradients = [torch.autograd.grad(loss, scores)[0] for loss in (ours, wanted)]
    assert gradients[0].abs().sum() > 0.1
    torch.testing.assert_close(*gradients)


def test_sentence_transformers_divergence_agrees() -> None:
    scores = torch.tensor(SCORES, requires_grad=True)
    model: Any = nn.Identity()
    given = DistillKLDivLoss(model, similarity_fct=lambda _, document: document, temperature=0.5)
    columns = [torch.zeros(1), *(scores[i : i + 1] for i in range(3, 7))]
    wanted = given.compute_loss_from_embeddings(columns, torch.tensor([TEACHER[3:7]]))
    torch.testing.assert_close(call(LOSSES["kl"], scores, slice(3, 7)), wanted)


@pytest.mark.parametrize("name", ["pointwise", *OF_GROUPS])
def test_each_loss_orders_a_linear_toy(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    features, truth = torch.randn(40, 6, generator=random), torch.randn(6, generator=random)
    quality = (features @ truth).view(8, 5)
    labels = (quality == quality.max(dim=1, keepdim=True).values).float().flatten()
    told = {"labels": labels, "scores": quality.flatten(), "group": torch.arange(8).repeat_interleave(5)}
    weight = torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        LOSSES[name].function(features @ weight, *(told[x] for x in LOSSES[name].targets), PLAIN).backward()
        optimizer.step()
    best = (features @ weight).view(8, 5).argmax(dim=1)
    assert (best == quality.argmax(dim=1)).float().mean() >= 0.75  # by chance 0.2


# A user's own.

OWN = """
import torch

def good(scores, labels, group):
    return ((scores - labels) ** 2).sum()

def many(scores, labels, group):
    return (scores - labels) ** 2

def number(scores, labels, group):
    return float(scores.detach().sum())

def detached(scores, labels, group):
    return scores.detach().sum()

def whole(scores, labels, group):
    return torch.tensor(3)

constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Loss]:
    (tmp_path / "our_losses.py").write_text(OWN)
    (tmp_path / "broken_losses.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: loss_of(config(LossConfig(name="custom", function=name, unit="group")))


def test_own_function(own: Callable[[str], Loss]) -> None:
    loss = own("our_losses:good")
    assert loss.whole_groups and loss.targets == ("labels", "group")
    scores = torch.tensor(SCORES, requires_grad=True)
    wanted = sum((s - y) ** 2 for s, y in zip(SCORES, LABELS, strict=True))
    assert float(call(loss, scores).detach()) == pytest.approx(wanted)
    assert loss_of(config(LossConfig(name="custom", function="our_losses:good"))).count(documents=7, groups=2) == 7


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("many", "gave a tensor of shape [8], not one number, for 8 documents"),
        ("number", "gave float, not a tensor"),
        ("detached", "gave a number without gradient"),
        ("whole", "gave a tensor of torch.int64, not of floating point"),
    ],
)
def test_own_function_that_gives_no_sum_is_refused(own: Callable[[str], Loss], name: str, said: str) -> None:
    loss = own(f"our_losses:{name}")
    with pytest.raises(ConfigError) as caught:
        call(loss, torch.tensor(SCORES, requires_grad=True))
    assert f"loss.function=our_losses:{name} {said}" in str(caught.value)
    assert "try  return one number that depends on the scores: the sum over its groups" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("our_lossses:good", "cannot be imported: ModuleNotFoundError: No module named 'our_lossses'"),
        ("our_losses:god", "cannot be imported: AttributeError: module 'our_losses' has no attribute 'god'"),
        ("broken_losses:good", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("our_losses:constant", "is int, not a function"),
    ],
)
def test_own_function_that_is_not_there_is_named(own: Callable[[str], Loss], name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"loss\.function=") as caught:
        own(name)
    assert f"loss.function={name} {said}" in str(caught.value)


def test_every_docstring_has_its_sections() -> None:
    for loss in LOSSES.values():
        for section in ("Computes:", "Inputs and labels:", "Reduction over ranks:", "Prefer another when:", "Source:"):
            assert section in (loss.function.__doc__ or ""), f"{loss.function.__name__} lacks {section}"
    assert {f.name for f in dataclasses.fields(Loss)} == {"function", "unit", "targets"}
