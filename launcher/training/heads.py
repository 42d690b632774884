"""What a task reads off the last hidden states: the third part of the module that DeepSpeed wraps.

A head says which rows it reads of a micro-batch (`reads`), so that the last layer computes no others, and is called
with those alone, (hidden [R, H], micro-batch), inside the wrapped module's forward, since parameters that ZeRO-3 has
partitioned exist only there. Shapes: R rows read, D documents, A answer tokens, C classes, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.errors import ConfigError, Problem
from launcher.spec import RunPlan
from launcher.training.batching import MicroBatch
from launcher.training.token_loss import token_losses


def make_head(plan: RunPlan, model: Any, ids: dict[str, int], device: torch.device) -> nn.Module:
    """The head of the plan's task for `model`, transformers' own (not peft's wrapper), after it was tuned.

    `ids` are the tokenizer's of "no" and "yes". A class head's weights come from torch's generator.
    """
    trains = plan.config.tune.head == "full"
    if plan.config.task.name == "sft":
        return LmHead(model, train=trains)
    head: nn.Module
    if plan.config.task.name == "classify":
        head = ClassHead(len(plan.config.task.classes), model.config.get_text_config().hidden_size, device)
    else:
        print(f"answer tokens: yes {ids['yes']}, no {ids['no']}")
        head = YesNoHead(answer_rows(model, ids["no"], ids["yes"]).to(device), train=trains)
    # DeepSpeed casts it too, but not beside weights that ZeRO-3 has sharded already: those it takes as they are.
    for parameter in head.parameters():
        parameter.data = parameter.data.to(model.get_input_embeddings().weight.dtype)
    return head


class YesNoHead(nn.Module):
    """score = h_last . (w_yes - w_no) in float32: the logit difference of the answers "yes" and "no".

    sigmoid(score) is the published P(yes). lm_head is never called: `train` makes its two rows an own parameter.
    """

    delta: torch.Tensor

    def __init__(self, rows: torch.Tensor, *, train: bool) -> None:
        """`rows` [2, H]: lm_head's rows of "no" and "yes"."""
        super().__init__()
        self.rows: nn.Parameter | None = nn.Parameter(rows.clone()) if train else None
        self.register_buffer("delta", rows[1].float() - rows[0].float(), persistent=False)

    def reads(self, batch: MicroBatch) -> torch.Tensor:
        """Each document's last token, [D]."""
        return batch.last

    def forward(self, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Scores [D], float32, of hidden [D, H]."""
        delta = self.delta if self.rows is None else self.rows[1].float() - self.rows[0].float()
        return hidden.float() @ delta


class ClassHead(nn.Module):
    """One row of weights a class, trained from nothing; no bias, as in transformers' sequence classifiers."""

    def __init__(self, classes: int, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, hidden, device=device).normal_(std=0.02))

    def reads(self, batch: MicroBatch) -> torch.Tensor:
        """Each prompt's last token, [D]."""
        return batch.last

    def forward(self, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Logits [D, C], float32, of hidden [D, H]."""
        return hidden.float() @ self.weight.float().T


class LmHead(nn.Module):
    """Cross-entropy of every answer token under the whole vocabulary, without keeping logits [A, V]."""

    def __init__(self, model: Any, *, train: bool) -> None:
        """Replaces `model.lm_head` by a layer with the same weight, under the same name; `train` lets it train.

        A weight tied to the embeddings trains when they do. Raises ConfigError when `train` asks for it alone.
        """
        super().__init__()
        weight = model.lm_head.weight
        if train and weight is model.get_input_embeddings().weight and not weight.requires_grad:
            raise _tied_alone()
        model.lm_head = AnswerLoss(model.lm_head)
        if train:
            weight.requires_grad_(True)
        # In a tuple, or the layer would be a module of two parents, and its weight have two names.
        self._called = (model.lm_head,)

    def reads(self, batch: MicroBatch) -> torch.Tensor:
        """The tokens before those of answers, [A]."""
        return batch.predicting

    def forward(self, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Losses [A], float32. Called for a micro-batch without answers too: ZeRO-3 gathers the weight on all ranks."""
        return self._called[0](hidden, batch.predicted)  # type: ignore[no-any-return]


def _tied_alone() -> ConfigError:
    text = "tune.head=full: this model's head is its embeddings (tie_word_embeddings), which are frozen"
    return ConfigError(Problem(text, tries=("tune.language=full   (both train)", "tune.head=frozen")))


class AnswerLoss(nn.Linear):
    """An lm_head that, told which tokens were wanted, gives their losses instead of logits.

    A module of its own name in the model, since ZeRO-3 gathers the weight where a module is called: once a
    micro-batch, however many answer tokens that has.
    """

    def __init__(self, linear: nn.Linear) -> None:
        assert getattr(linear, "bias", None) is None, "no lm_head of the families has a bias"
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight  # the same object: adapters, ties and ZeRO's partition stay

    def forward(self, input: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Losses [A] float32 of `wanted` [A] after `input` [A, H]; logits when nothing is wanted."""
        if wanted is None:
            return super().forward(input)
        return token_losses(input, self.weight, wanted)


def answer_rows(model: Any, no_id: int, yes_id: int) -> torch.Tensor:
    """lm_head's rows of "no" and "yes", [2, H] float32, gathered when ZeRO-3 has partitioned them."""
    weight = model.get_output_embeddings().weight
    if not hasattr(weight, "ds_id"):
        return weight.detach()[[no_id, yes_id]].float().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight]):
        return weight.detach()[[no_id, yes_id]].float().clone()
