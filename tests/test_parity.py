"""Packed, shared-prefix training against one document at a time through transformers' own forward."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import torch.nn.functional as F

from launcher.training import processors
from launcher.training.batching import collate, make_units
from launcher.training.encoding import Encoder, make_encoder
from launcher.training.engine import build_scorer
from launcher.training.losses import LOSSES
from launcher.training.pixels import Pixels
from launcher.training.prompts import SYSTEM
from launcher.training.rows import Content, Group, Image
from tests.groups import GROUPS, group, picture
from tests.tiny import INSTRUCTION, tiny_plan


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plan = tiny_plan(tmp_path_factory.mktemp("run"))
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    return {"plan": plan, "processor": processor, "scorer": scorer, "encoder": make_encoder(plan, processor)}


def packed_loss(parts: dict[str, Any], groups: list[Group], encoder: Encoder, loss: str) -> tuple[Any, Any]:
    plan, scorer = parts["plan"], parts["scorer"]
    encoded = [encoder.encode(g) for g in groups]
    units = make_units(encoded, plan.cost, 8192, splittable=False)
    pixels = Pixels(parts["processor"])
    needed = {s.key: pixels.rows(s) for e in encoded for p in e.prompts for s in p.media}
    batch = collate(encoded, units, needed, padded=True)
    scores = scorer(batch)
    return scores, LOSSES[loss](scores, batch, plan.config.loss)


def reference_scores(parts: dict[str, Any], one: Group) -> torch.Tensor:
    """Each document alone, through the processor, transformers' whole forward and lm_head."""
    processor, model = parts["processor"], parts["scorer"].model
    ids = processors.token_ids(processor)
    scores = []
    for document in one.documents:
        query, found = _as_text(one.query)
        shown, more = _as_text(document)
        prompt = (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {INSTRUCTION}<Query>:{query}"
            f"\n<Document>:{shown}<|im_end|>\n<|im_start|>assistant\n"
        )
        inputs = processor(text=[prompt], images=(found + more) or None, return_tensors="pt")
        logits = model(**inputs, use_cache=False).logits[0, -1].float()
        scores.append(logits[ids["yes"]] - logits[ids["no"]])
    return torch.stack(scores)


def _as_text(content: Content) -> tuple[str, list[Any]]:
    images = [PIL.Image.open(io.BytesIO(p.data)) for p in content if isinstance(p, Image)]
    text = "".join("<|vision_start|><|image_pad|><|vision_end|>" if isinstance(p, Image) else p for p in content)
    return text or "NULL", images


@pytest.fixture
def transformers_attention(parts: dict[str, Any]) -> Any:
    """The reference runs on transformers' own attention, not on ours."""
    core = parts["scorer"].core
    configs = [core.language_model.config, core.visual.config]
    ours = [c._attn_implementation for c in configs]

    def use(names: list[str]) -> None:
        for config, name in zip(configs, names, strict=True):
            config._attn_implementation_internal = name

    yield lambda on: use(["eager", "eager"] if on else ours)
    use(ours)


def gradients(scorer: Any) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in scorer.named_parameters() if p.grad is not None}
    scorer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("checkpointed", [0, 4])
def test_shared_prefix_equals_one_document_at_a_time(
    parts: dict[str, Any], kind: str, checkpointed: int, transformers_attention: Any
) -> None:
    from launcher.training.tuning import checkpoint_layers

    scorer, groups = parts["scorer"], GROUPS[kind]
    scorer.train()
    checkpoint_layers(scorer.core, checkpointed)
    scores, loss = packed_loss(parts, groups, parts["encoder"], "listwise")
    loss.backward()
    ours = gradients(scorer)
    for layer in [*scorer.core.language_model.layers, *scorer.core.visual.blocks]:
        layer.gradient_checkpointing = False

    transformers_attention(True)
    wanted = [reference_scores(parts, one) for one in groups]
    expected = torch.stack([-F.log_softmax(s, dim=0)[0] for s in wanted]).sum()
    expected.backward()
    theirs = gradients(scorer)

    torch.testing.assert_close(scores, torch.cat(wanted), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert any("language_model.layers.0" in name for name in ours)  # some gradient arrived
    tied = {"model.lm_head.weight", "model.model.language_model.embed_tokens.weight"}  # the head is frozen here only
    for name in set(theirs) - tied:
        got = ours.get(name, torch.zeros_like(theirs[name]))
        torch.testing.assert_close(got, theirs[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", GROUPS)
def test_sharing_changes_the_work_and_not_the_result(parts: dict[str, Any], kind: str) -> None:
    import dataclasses

    plan = parts["plan"]
    config = dataclasses.replace(plan.config, attention=dataclasses.replace(plan.config.attention, shared_prefix=False))
    apart = make_encoder(dataclasses.replace(plan, config=config), parts["processor"])
    groups = GROUPS[kind]
    shared, alone = ([e.encode(g) for g in groups] for e in (parts["encoder"], apart))
    assert sum(e.tokens for e in shared) < sum(e.tokens for e in alone)
    for loss in ("pointwise", "listwise", "ranknet"):
        one, first = packed_loss(parts, groups, parts["encoder"], loss)
        two, second = packed_loss(parts, groups, apart, loss)
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_prefix_ends_before_tokens_that_join_the_document(parts: dict[str, Any]) -> None:
    encoder = parts["encoder"]
    one = encoder.encode(group(("q",), (")x",), (":(",)))
    for prompt in one.prompts:
        assert len(prompt) > one.prefix
    ids = [prompt.ids for prompt in one.prompts]
    assert (ids[0][: one.prefix] == ids[1][: one.prefix]).all() and ids[0][one.prefix] != ids[1][one.prefix]


def test_positions_equal_transformers(parts: dict[str, Any]) -> None:
    encoder, core = parts["encoder"], parts["scorer"].core
    image_id = processors.token_ids(parts["processor"])["image"]
    for one in (g for groups in GROUPS.values() for g in groups):
        for prompt in encoder.encode(one).prompts:
            ids = torch.from_numpy(prompt.ids)[None]
            kinds = (ids == image_id).int()
            grids = torch.tensor([s.grid for s in prompt.media]) if prompt.media else None
            wanted, _ = core.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
            assert (torch.from_numpy(prompt.positions) == wanted[:, 0]).all()


def test_long_documents_lose_their_end_and_nothing_else(parts: dict[str, Any], tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, dataset={"name": "jsonl", "max_length": 260})
    short = make_encoder(plan, parts["processor"])
    one = group(("the query",), ("word " * 400,), ("b",))
    whole, cut = parts["encoder"].encode(one).prompts[0], short.encode(one).prompts[0]
    assert len(whole) > 260 and len(cut) == 260
    tail = 5  # <|im_end|> newline <|im_start|> assistant newline, in tokens of any tokenizer at least
    assert (whole.ids[-tail:] == cut.ids[-tail:]).all()
    same = (whole.ids[: 260 - 50] == cut.ids[: 260 - 50]).all()
    assert same
    with pytest.raises(ValueError, match="dataset.max_length"):
        short.encode(group(("word " * 400,), ("a",), ("b",)))
    with pytest.raises(ValueError, match="a positive and a negative read the same"):
        short.encode(group(("the query",), ("word " * 400,), ("word " * 401,)))


def test_pixels_reach_the_scores(parts: dict[str, Any]) -> None:
    """I19: prompts that differ in their pixels alone."""
    one = group(("q",), (picture(1),), (picture(2),))
    first, second = parts["encoder"].encode(one).prompts
    assert (first.ids == second.ids).all()
    scores, _ = packed_loss(parts, [one], parts["encoder"], "listwise")
    assert abs(float((scores[0] - scores[1]).detach())) > 1e-4


def test_special_tokens_in_user_text_are_text(parts: dict[str, Any]) -> None:
    """I18."""
    encoder = parts["encoder"]
    image_id = processors.token_ids(parts["processor"])["image"]
    prompt = encoder.encode(group(("q",), ("<|image_pad|> <|im_end|>",), ("b",))).prompts[0]
    end = encoder.pieces.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert image_id not in prompt.ids and (prompt.ids == end).sum() == 2
