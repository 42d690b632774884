"""Every model family: built, loaded, and its packed forward held to transformers' own, one document at a time."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import torch.nn.functional as F

from launcher.errors import ConfigError
from launcher.families import FAMILIES
from launcher.planning.models import parameter_counts
from launcher.planning.shapes import read_shape
from launcher.training import backbone, layouts, models, processors
from launcher.training.batching import MicroBatch, collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.pixels import Pixels
from launcher.training.prompts import SYSTEM
from launcher.training.rows import Content, Group, Image
from tests.groups import group, picture
from tests.tiny import family_plan

SEEING = [name for name, family in FAMILIES.items() if family.sees]
TEXT = [
    group(("what is it",), ("a ring",), (":( no",), ("\n\nline",), ("a red ring of the door",)),
    group(("why",), ("because",), ("the sky is blue",)),
]
# Larger than one window of Qwen2.5-VL's tower, and not square.
PICTURES = [
    group((picture(1, 112, 150), "what?"), ("a red door",), (picture(2, 64, 96), "blue")),
    group(("only text",), ("a",), (picture(3), picture(1, 112, 150))),
]
ASKED = {
    "vl": (
        "<Instruct>: Given a search query, retrieve relevant candidates that answer the query.<Query>:{}\n"
        "<Document>:{}",
        "",
    ),
    "text": (
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {}\n"
        "<Document>: {}",
        "<think>\n\n</think>\n\n",
    ),
}


def prompt_of(style: str, query: str, document: str) -> str:
    """The published prompt, written out."""
    asked, thought = ASKED[style]
    user = asked.format(query, document)
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{thought}"
    )


def shown(content: Content) -> tuple[str, list[Any]]:
    """Content as a user of transformers gives it to a processor."""
    images = [PIL.Image.open(io.BytesIO(p.data)) for p in content if isinstance(p, Image)]
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    return "".join(pad if isinstance(p, Image) else str(p) for p in content), images


def one_at_a_time(model: Any, processor: Any, style: str, groups: list[Group]) -> torch.Tensor:
    """Scores of every document alone, through the processor and transformers' whole forward."""
    ids, scores = processors.token_ids(processor), []
    for one in groups:
        for document in one.documents:
            (query, found), (text, more) = shown(one.query), shown(document)
            media = {"images": found + more} if found + more else {}
            inputs = processor(text=[prompt_of(style, query, text)], return_tensors="pt", **media)
            logits = model(**inputs, use_cache=False).logits[0, -1].float()
            scores.append(logits[ids["yes"]] - logits[ids["no"]])
    return torch.stack(scores)


def packed(plan: Any, processor: Any, groups: list[Group]) -> MicroBatch:
    """All groups in one micro-batch."""
    encoder = make_encoder(plan, processor)
    encoded = [encoder.encode(g) for g in groups]
    pixels = Pixels(processor)
    needed = {s.key: pixels.rows(s) for e in encoded for p in e.prompts for s in p.media}
    return collate(encoded, make_units(encoded, plan.cost, 8192, splittable=False), needed, padded=True)


def gradients(module: Any) -> dict[str, torch.Tensor]:
    """By live name, without those of the head, which ours does not call, and of embeddings that may be tied to it."""
    return {
        name: p.grad
        for name, p in module.named_parameters()
        if p.grad is not None and "embed_tokens" not in name and "lm_head" not in name
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_folders_load_whole_and_equal(name: str, tmp_path: Path) -> None:
    """Files have other names than the live model in some families, and turned experts in one."""
    family, plan = FAMILIES[name], family_plan(tmp_path, name)
    processor = processors.load_processor(plan)
    model = models.load_model(plan, processors.special_ids(processor), torch.device("cpu"))
    for part in (model, processor):
        part.save_pretrained(tmp_path / "m")
    if family.turned:
        with pytest.raises(ConfigError, match="was saved by transformers 5, whose experts ZeRO-3 cannot load"):
            layouts.check_published(tmp_path / "m", family, 24)
    layouts.publish(tmp_path / "m", family)
    layouts.check_published(tmp_path / "m", family, 24)

    arch = json.loads((tmp_path / "m" / "config.json").read_text())
    local = replace(plan.config.model, path=str(tmp_path / "m"), weights="pretrained")
    again = replace(plan, config=replace(plan.config, model=local), arch=arch)
    loaded = processors.load_processor(again, local_only=True)
    assert processors.token_ids(loaded) == processors.token_ids(processor)
    reloaded = models.load_model(again, processors.special_ids(loaded), torch.device("cpu"))
    weights = model.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in reloaded.state_dict().items())
    assert parameter_counts(read_shape(local, arch)) == parameter_counts(read_shape(plan.config.model, plan.arch))


def test_a_head_that_is_not_in_the_files_is_no_random_one(tmp_path: Path) -> None:
    """R13."""
    plan = family_plan(tmp_path, "qwen3")
    plan.arch["tie_word_embeddings"] = False
    ids = processors.special_ids(processors.load_processor(plan))
    model = models.load_model(plan, ids, torch.device("cpu"))
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path / "m", state_dict=weights)
    local = replace(plan.config.model, path=str(tmp_path / "m"), weights="pretrained")
    plan = replace(plan, config=replace(plan.config, model=local))
    with pytest.raises(ConfigError, match=r"does not hold this model: missing \['lm_head.weight'\]"):
        models.load_model(plan, ids, torch.device("cpu"))


def test_sparse_layers_of_an_unnamed_kind_are_refused_under_zero_3() -> None:
    """Z05."""

    class StrangeExperts(torch.nn.Module):
        pass

    with pytest.raises(ConfigError, match="StrangeExperts hold experts, and family qwen3_vl names none"):
        models.mark_leaves(torch.nn.Sequential(StrangeExperts()), FAMILIES["qwen3_vl"])


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_one_document_at_a_time(name: str, tmp_path: Path) -> None:
    family, plan = FAMILIES[name], family_plan(tmp_path, name, task={"instruction": None})
    groups = TEXT + PICTURES if family.sees else TEXT
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu")).train()
    batch = packed(plan, processor, groups)
    scores = scorer(batch)
    F.softplus(scores).sum().backward()

    alone = models.load_model(plan, processors.special_ids(processor), torch.device("cpu")).train()
    for part in (backbone.language_of(alone.model), backbone.tower_of(alone.model)):
        if part is not None:
            part.config._attn_implementation_internal = "eager"
    wanted = one_at_a_time(alone, processor, family.prompt, groups)
    F.softplus(wanted).sum().backward()

    torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=1e-5)
    ours, theirs = gradients(scorer.model), gradients(alone)
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        torch.testing.assert_close(ours[key], gradient, atol=2e-6, rtol=1e-3, msg=lambda m, k=key: f"{k}: {m}")
    parts = {family.part_of(key) for key, gradient in theirs.items() if gradient.abs().max() > 0}
    assert parts == {"language", *(("vision", "projector") if family.sees else ())}  # every part had a gradient
    shares = batch.layout.key_rows is not None
    assert shares is not family.recurrent
