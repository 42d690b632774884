"""Losses: pure functions from what a head gives to one sum, and the unit whose count that sum is divided by.

A loss returns the *sum* over its units and never a mean: the training loop divides by the count of the whole
global batch, so the value does not depend on ranks or micro-batches. Groups are compared through masks of
documents by documents, so that nothing waits for the device and group ids may stand in any order.

Shapes: D documents, A answer tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from launcher.errors import ConfigError, Problem
from launcher.spec import LossConfig, RunConfig
from launcher.training.functions import load_function

if TYPE_CHECKING:
    from launcher.training.batching import MicroBatch


def pointwise_loss(scores: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Binary cross-entropy of each document's score.

    Computes: sum over documents of -y log sigmoid(s) * positive_weight - (1 - y) log sigmoid(-s). With
    s = z_yes - z_no this is the cross-entropy over the two answer tokens, the published objective.
    Inputs and labels: scores [D] float32; labels [D], where a grade above 1 counts as 1; `group` is not used.
    Reduction over ranks: sum; the unit counted is the document.
    Prefer another when: only the order inside a group matters (listwise, pairwise).
    Source: Qwen3 Embedding report, arXiv 2506.05176, reranker objective.
    """
    weight = torch.full_like(scores, config.positive_weight)
    return F.binary_cross_entropy_with_logits(scores, labels.clamp(max=1.0), pos_weight=weight, reduction="sum")


def listwise_loss(scores: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Softmax cross-entropy over the documents of each group.

    Computes: sum over groups of -sum_d p_d log softmax(s / temperature)_d, with p the group's labels divided by
    their sum: uniform over several positives, in proportion to their grades.
    Inputs and labels: scores [D] float32; labels [D], 0 or above; group [D] ids, whole in one call.
    Reduction over ranks: sum; the unit counted is the group.
    Prefer another when: the score itself must be a calibrated probability (pointwise), or groups have no negative.
    Source: Cao et al. 2007, Learning to Rank: From Pairwise Approach to Listwise Approach (ListNet, top one).
    """
    same = _same(group)
    total = (same * labels).sum(dim=1)  # not a product of matrices, which TF32 would round
    target = labels / torch.where(total > 0, total, 1.0)
    return -(target * _log_softmax(scores / config.temperature, same)).sum()


def ranknet_loss(scores: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Logistic loss of every pair of a group in which one document is more relevant than the other.

    Computes: sum over groups of the mean over pairs (a, b) with y_a > y_b of -log sigmoid(s_a - s_b).
    Inputs and labels: scores [D] float32; labels [D], grades welcome; group [D] ids, whole in one call. A group
    without such a pair adds 0 and is counted.
    Reduction over ranks: sum; the unit counted is the group, so that a query weighs the same whatever its pairs.
    Prefer another when: many documents compete and the first places matter most (listwise).
    Source: Burges et al. 2005, Learning to Rank using Gradient Descent (RankNet).
    """
    better = _same(group) & (labels[:, None] > labels)
    return _mean_over_pairs(-F.logsigmoid(_differences(scores)), better, group)


def margin_loss(scores: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Hinge loss of every pair of a group in which one document is more relevant than the other.

    Computes: sum over groups of the mean over pairs (a, b) with y_a > y_b of max(0, margin - (s_a - s_b)).
    Inputs and labels: as ranknet_loss.
    Reduction over ranks: sum; the unit counted is the group.
    Prefer another when: pairs that are right by the margin should still teach (ranknet).
    Source: Herbrich et al. 2000, Large Margin Rank Boundaries for Ordinal Regression.
    """
    better = _same(group) & (labels[:, None] > labels)
    return _mean_over_pairs((config.margin - _differences(scores)).clamp(min=0.0), better, group)


def margin_mse_loss(
    scores: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor, group: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """Squared error of score differences between positives and negatives, against the teacher's.

    Computes: sum over groups of the mean over pairs (a, b) with y_a > y_b of ((s_a - s_b) - (t_a - t_b))^2.
    Inputs and labels: scores and teacher [D] float32, labels [D], group [D] ids, whole in one call. A group
    without such a pair adds 0 and is counted. The teacher's scale is learned too: give it as logits.
    Reduction over ranks: sum; the unit counted is the group.
    Prefer another when: the teacher's scale means nothing, or rows have no label (kl).
    Source: Hofstaetter et al. 2020, arXiv 2010.02666 (Margin-MSE).
    """
    better = _same(group) & (labels[:, None] > labels)
    return _mean_over_pairs((_differences(scores) - _differences(teacher)).square(), better, group)


def kl_loss(
    scores: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor, group: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """Divergence of the scores' distribution over a group's documents from the teacher's.

    Computes: sum over groups of T^2 KL(softmax(t / T) || softmax(s / T)), T the temperature; T^2 keeps the
    gradient's size (Hinton et al. 2015).
    Inputs and labels: scores and teacher [D] float32; group [D] ids, whole in one call; `labels` are not used.
    Reduction over ranks: sum; the unit counted is the group.
    Prefer another when: the student's scores should have the teacher's scale (margin_mse).
    Source: Lin et al. 2020, arXiv 2010.11386; Hinton et al. 2015, arXiv 1503.02531.
    """
    same = _same(group)
    wanted, given = (_log_softmax(values / config.temperature, same) for values in (teacher, scores))
    return config.temperature**2 * (wanted.exp() * (wanted - given)).sum()


def answer_loss(losses: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Cross-entropy of the answers' tokens (task sft).

    Computes: the sum of its inputs; the head has computed each token's -log p over the whole vocabulary, in
    chunks, so that no logits of a whole micro-batch exist.
    Inputs and labels: losses [A] float32, one for each token that an answer has.
    Reduction over ranks: sum; the unit counted is the answer token, so a long answer weighs more than a short one.
    Prefer another when: only a choice between two answers matters (task=rerank).
    Source: the usual objective of instruction tuning (Wei et al. 2021, arXiv 2109.01652).
    """
    return losses.sum()


def class_loss(logits: torch.Tensor, labels: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Cross-entropy of the right class (task classify).

    Computes: sum over rows of -log softmax(z)_y.
    Inputs and labels: logits [D, C] float32; labels [D], numbers of classes from 0.
    Reduction over ranks: sum; the unit counted is the document.
    Prefer another when: classes are answers in words that the model already knows (task=sft).
    Source: multinomial logistic regression.
    """
    return F.cross_entropy(logits, labels.long(), reduction="sum")


def _same(group: torch.Tensor) -> torch.Tensor:
    """[D, D]: whether two documents are of one group."""
    return group[:, None] == group


def _differences(values: torch.Tensor) -> torch.Tensor:
    """[D, D]: row minus column."""
    return values[:, None] - values


def _log_softmax(values: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    """Log-softmax of each value among those of its group, [D]."""
    if not len(values):  # an empty micro-batch; logsumexp needs something to reduce
        return values
    return values - values.expand(len(values), -1).masked_fill(~same, -torch.inf).logsumexp(dim=1)


def _mean_over_pairs(costs: torch.Tensor, pairs: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Sum over groups of the mean cost of its pairs; `pairs` [D, D] says which rows and columns make one."""
    weights = pairs.to(costs.dtype)
    number = (_same(group) * weights.sum(dim=1)).sum(dim=1)  # pairs in a document's group
    return (costs * weights / number.clamp(min=1.0)[:, None]).sum()


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, the unit its sum is divided by, and what it is told.

    `unit` is what `sum / count` averages over: documents, groups, or the answer tokens of chats. A group may be
    split over micro-batches unless its documents are compared (`whole_groups`). `targets` are the fields of a
    MicroBatch that the function gets between the outputs and the configuration.
    """

    function: Callable[..., torch.Tensor]
    unit: str  # document | group | answer
    targets: tuple[str, ...] = ("labels", "group")

    @property
    def whole_groups(self) -> bool:
        """Whether a group must stay on one rank, in one micro-batch."""
        return self.unit == "group"

    def count(self, documents: int, groups: int, answers: int = 0) -> int:
        """Units in so many documents, groups and answer tokens."""
        return {"document": documents, "group": groups, "answer": answers}[self.unit]

    def __call__(self, outputs: torch.Tensor, batch: MicroBatch, config: LossConfig) -> torch.Tensor:
        """The sum over the units of a micro-batch, from what its forward pass gave."""
        return self.function(outputs, *(getattr(batch, name) for name in self.targets), config)


_TAUGHT = ("labels", "scores", "group")
LOSSES = {
    "pointwise": Loss(pointwise_loss, unit="document"),
    "listwise": Loss(listwise_loss, unit="group"),
    "ranknet": Loss(ranknet_loss, unit="group"),
    "margin": Loss(margin_loss, unit="group"),
    "margin_mse": Loss(margin_mse_loss, unit="group", targets=_TAUGHT),
    "kl": Loss(kl_loss, unit="group", targets=_TAUGHT),
    "sft": Loss(answer_loss, unit="answer", targets=()),
    "classify": Loss(class_loss, unit="document", targets=("labels",)),
}


def loss_of(config: RunConfig) -> Loss:
    """The loss of a run: by name, by form, or by task; raises ConfigError for a function that cannot be imported."""
    loss = config.loss
    if loss.name == "custom":
        return Loss(_checked(loss), unit=loss.unit)
    if loss.name in ("pairwise", "distill"):
        return LOSSES[loss.form]
    return LOSSES[config.task.name if loss.name == "cross_entropy" else loss.name]


def _checked(config: LossConfig) -> Callable[..., torch.Tensor]:
    """The user's function(scores, labels, group), its result looked at each time: one sum, with a gradient."""
    assert config.function is not None
    function = load_function(config.function, "loss.function")

    def checked(scores: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, _: LossConfig) -> torch.Tensor:
        value = function(scores, labels, group)
        wrong = _wrong(value, scores)
        if wrong is not None:
            text = f"loss.function={config.function} gave {wrong}, for {len(scores)} documents"
            tries = (f"return one number that depends on the scores: the sum over its {config.unit}s",)
            raise ConfigError(Problem(text, tries=tries), title="with the loss")
        return value  # type: ignore[no-any-return]

    return checked


def _wrong(value: object, scores: torch.Tensor) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__}, not a tensor"
    if value.dim() != 0:
        return f"a tensor of shape {list(value.shape)}, not one number"
    if not value.is_floating_point():
        return f"a tensor of {value.dtype}, not of floating point"
    if scores.requires_grad and not value.requires_grad:
        return "a number without gradient (were the scores detached?)"
    return None
