"""Decoder layers of the fused functions against transformers' own: values and every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.errors import ConfigError
from launcher.spec import RunPlan
from launcher.training import processors
from launcher.training.backbone import language_of
from launcher.training.batching import MicroBatch, collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.fused import layer
from launcher.training.fused.projections import Joined, Projection, refresh
from launcher.training.pixels import Pixels
from launcher.training.tuning import checkpoint_layers
from tests.groups import GROUPS
from tests.tiny import family_plan

LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen"}
TUNES: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora of rank 40": {**LORA, "r": 40, "use_rslora": True},
    "some linears": {**LORA, "target_modules": r".*layers.*\.(q_proj|up_proj|down_proj)"},
    "full": {},
}
CASES = [("qwen3_vl", tune) for tune in TUNES] + [(family, "lora") for family in ("qwen2_5_vl", "qwen3", "qwen2")]
CASES += [("qwen2_5_vl", "full")]  # biases train


@pytest.mark.parametrize(("family", "tune"), CASES)
def test_scores_and_gradients_are_those_of_transformers_layers(family: str, tune: str, tmp_path: Path) -> None:
    found = {}
    for kernels in ("plain", "fused"):
        plan = family_plan(tmp_path, family, tune=TUNES[tune], train={"kernels": kernels})
        scorer, batch = _ready(plan)
        found[kernels] = _scores_and_gradients(scorer, batch)
    layer.lay_together(language_of(scorer.core))
    found["weights laid together"] = _scores_and_gradients(scorer, batch)
    checkpoint_layers(scorer.core, 1)
    found["one layer recomputed"] = _scores_and_gradients(scorer, batch)
    nothing, zeros = _scores_and_gradients(scorer, collate([], [], {}, padded=True))  # as other ranks have more
    assert len(nothing) == 0 and zeros and not any(gradient.any() for gradient in zeros.values())
    scores, gradients = found.pop("plain")
    assert any("layers.0" in name for name in gradients)
    for ours, theirs in found.values():
        torch.testing.assert_close(ours, scores, atol=1e-5, rtol=1e-5)
        assert theirs.keys() == gradients.keys()
        for name, wanted in gradients.items():
            torch.testing.assert_close(theirs[name], wanted, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_asked_for_where_they_cannot_be_they_are_refused(tmp_path: Path) -> None:
    plan = family_plan(tmp_path, "qwen3", tune={**LORA, "lora_dropout": 0.1}, train={"kernels": "fused"})
    with pytest.raises(ConfigError, match="lora_dropout"):
        build_scorer(plan, processors.load_processor(plan), torch.device("cpu"))


def _ready(plan: RunPlan) -> tuple[Any, MicroBatch]:
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    scorer.train()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in scorer.named_parameters():
        if "lora_B" in name:  # zeros at the start, behind which A has no gradient
            parameter.data.normal_(std=0.1, generator=generator)
    encoder, pixels = make_encoder(plan, processor), Pixels(processor)
    groups = GROUPS["text" if plan.arch.get("vision_config") is None else "mixed"]
    encoded = [encoder.encode(group) for group in groups]
    needed = {s.key: pixels.rows(s) for e in encoded for p in e.prompts for s in p.media}
    return scorer, collate(encoded, make_units(encoded, plan.cost, 8192, splittable=False), needed, padded=True)


def _scores_and_gradients(scorer: Any, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    scores = scorer(batch)
    (scores * torch.linspace(-1, 1, len(scores))).sum().backward()
    found = {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
    scorer.zero_grad(set_to_none=True)
    return scores.detach(), found


def test_weights_one_behind_another_are_one_product() -> None:
    """DeepSpeed lays weights that train so; a frozen or a larger one between them, or a type of its own, parts them."""
    flat, joined = torch.randn(7 * 4 + 5), Joined(*(Projection(base=nn.Linear(4, n, bias=False)) for n in (2, 2, 3)))
    weights = [member.base.weight for member in joined.members]
    assert joined._weight() is None
    for begin, weight in zip((0, 8, 16), weights, strict=True):
        weight.data = flat[begin : begin + weight.numel()].view_as(weight)
    found = joined._weight()
    assert found is not None and found.data_ptr() == flat.data_ptr()
    torch.testing.assert_close(found, torch.cat([weight.detach() for weight in weights]), atol=0, rtol=0)
    x, dy = torch.randn(5, 4), torch.randn(5, 7)
    together = joined.forward(x)[0], joined.backward_input(dy, None), joined.gradients(dy, None, None, x)
    weights[2].data = flat[21:33].view_as(weights[2])
    assert joined._weight() is None
    weights[2].data = flat[16:28].view_as(weights[2]).clone()
    assert joined._weight() is None
    apart = joined.forward(x)[0], joined.backward_input(dy, None), joined.gradients(dy, None, None, x)
    torch.testing.assert_close(together, apart)


def test_small_adapters_count_by_what_they_add() -> None:
    """Added before a result is rounded, a fiftieth of what bf16 tells apart is still there on average."""
    torch.manual_seed(0)
    base, down, up = (nn.Linear(*sides, bias=False, dtype=torch.bfloat16) for sides in ((64, 512), (64, 8), (8, 512)))
    joined = Joined(Projection(base=base, down=down, up=up))
    base.requires_grad_(False).weight.data.normal_(std=0.125)
    down.weight.data.zero_()[:, 0] = 1
    x = torch.randn(1024, 64).to(torch.bfloat16)
    x[:, 0] = 1  # so that adapters add the same everywhere
    joined.lay_together()
    results = []
    for size in (0.0, 1e-5):
        up.weight.data.fill_(size)
        refresh([joined])
        out, low, _ = joined.forward(x)
        assert low is None
        results.append(out.double())
    assert (results[1] - results[0]).mean() == pytest.approx(8e-5, rel=0.1)
