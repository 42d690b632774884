"""The loss on the answers of chats, packed, against transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from launcher.errors import ConfigError
from launcher.training import evaluate, processors
from launcher.training.batching import make_units, split_step
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.losses import loss_of
from launcher.training.pixels import Pixels
from launcher.training.rows import Row
from tests.groups import GROUPS, group, packed
from tests.test_chats import CHATS
from tests.tiny import tiny_arch, tiny_plan

ROWS: list[Row] = [*CHATS.values(), *GROUPS["image documents"], *GROUPS["text"]]


def parts(tmp_path: Path, *, tied: bool, **tune: Any) -> dict[str, Any]:
    options = {"name": "full", "language": "full", "vision": "full", "projector": "full", **tune}
    plan = tiny_plan(tmp_path, task={"name": "sft"}, loss={"name": "cross_entropy"}, tune=options)
    plan = dataclasses.replace(plan, arch={**tiny_arch(), "dtype": "float32", "tie_word_embeddings": tied})
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    return {"plan": plan, "processor": processor, "scorer": scorer, "encoder": make_encoder(plan, processor)}


def gradients(scorer: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
    scorer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_packed_chats_equal_transformers(tmp_path: Path, tied: bool) -> None:
    made = parts(tmp_path, tied=tied, head="full")
    plan, scorer, processor = made["plan"], made["scorer"], made["processor"]
    rows = list(CHATS.values())
    encoded = [made["encoder"].encode(row) for row in rows]
    batch = packed(made["processor"], encoded, make_units(encoded, plan.cost, 8192, splittable=True))
    loss = loss_of(plan.config)
    value = loss(scorer(batch), batch, plan.config.loss)
    value.backward()
    ours = gradients(scorer)

    total, core, pixels = torch.zeros(()), scorer.core, Pixels(processor)
    for config in (core.language_model.config, core.visual.config):
        config._attn_implementation_internal = "eager"
    for one in encoded:
        (prompt,) = one.prompts
        ids = torch.from_numpy(prompt.ids)[None]
        kinds = (ids == processors.token_ids(processor)["image"]).int()
        images: dict[str, torch.Tensor] = {}
        if prompt.media:
            images["pixel_values"] = torch.cat([pixels.rows(slot).numbers() for slot in prompt.media])
            images["image_grid_thw"] = torch.tensor([slot.grid for slot in prompt.media])
        logits = scorer.model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **images).logits[0]
        answer = torch.from_numpy(prompt.answer)
        total = total + F.cross_entropy(logits[:-1][answer[1:]], ids[0, 1:][answer[1:]], reduction="sum")
    total.backward()
    theirs = gradients(scorer)
    torch.testing.assert_close(value, total, atol=1e-4, rtol=1e-5)
    assert set(ours) == set(theirs) and ("model.lm_head.weight" in ours) != tied
    assert ours["model.model.language_model.embed_tokens.weight"].abs().sum() > 0
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_any_division_has_the_same_loss_and_gradient(tmp_path: Path) -> None:
    made = parts(tmp_path, tied=False)
    plan, scorer = made["plan"], made["scorer"]
    assert not scorer.model.lm_head.weight.requires_grad
    encoded = [made["encoder"].encode(row) for row in ROWS]
    loss, found = loss_of(plan.config), []
    for ranks, max_tokens in ((1, 8192), (2, 160), (3, 400)):
        units = make_units(encoded, plan.cost, max_tokens, splittable=True)
        steps = split_step(units, [1.0] * ranks, max_tokens)
        batches = [packed(made["processor"], encoded, step) for rank in steps for step in rank]
        count = sum(len(batch.predicted) for batch in batches)
        value = sum(loss(scorer(batch), batch, plan.config.loss) for batch in batches)
        value.backward()
        found.append((len(batches), count, value.detach(), gradients(scorer)))
    (_, count, value, wanted), *others = found
    for batches, other_count, other, got in others:
        assert batches > 1 and other_count == count
        torch.testing.assert_close(other, value, atol=1e-4, rtol=1e-5)
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_a_micro_batch_without_answers_adds_nothing(tmp_path: Path) -> None:
    made = parts(tmp_path, tied=True)
    batch = packed(made["processor"], [], [])
    losses = made["scorer"](batch)
    losses.sum().backward()
    found = gradients(made["scorer"])
    assert losses.shape == (0,) and "model.model.language_model.embed_tokens.weight" in found
    assert all(not gradient.any() for gradient in found.values())


def test_a_tied_head_does_not_train_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tune.head=full: this model's head is its embeddings"):
        parts(tmp_path, tied=True, language="frozen", head="full")


def test_held_out_loss_and_perplexity() -> None:
    config = tiny_plan(Path("."), task={"name": "sft"}, loss={"name": "cross_entropy"}).config
    found = evaluate.numbers(evaluate.Outputs(chats={0, 1}, losses=[(3.0, 2), (0.0, 0), (1.0, 2)]), config)
    assert found == {"eval/loss": 1.0, "eval/perplexity": pytest.approx(2.718281828)}
    rerank = tiny_plan(Path("."), loss={"name": "pointwise"}).config
    scores = {0: evaluate.Scored([0.0, 0.0], [1.0, 0.0], [0.0, 0.0]), 1: evaluate.Scored([0.0], [0.0], [0.0])}
    assert evaluate.held_out_loss(scores, rerank) == pytest.approx(0.6931472)
    taught = tiny_plan(Path("."), loss={"name": "distill", "form": "margin_mse"}).config
    none = float("nan")
    rows = {
        0: evaluate.Scored([3.0, 0.0], [1.0, 0.0], [1.0, 0.0]),
        1: evaluate.Scored([1.0, 0.0], [1.0, 0.0], [none] * 2),
    }
    assert evaluate.held_out_loss(rows, taught) == 4.0  # of the row whose teacher is known
    assert "eval/loss" not in evaluate.numbers(evaluate.Outputs(records={1: rows[1]}), taught)
    assert group(("q",), ("a",)).labels == (1.0,)
