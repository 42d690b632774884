"""Fused decoder layers on a GPU against transformers' own: scores and every gradient of a small model.

In float32 the two differ by the order of sums alone, so that a wrong kernel shows. Weights laid together with their
adapters are what ZeRO 0 to 2 has; apart, as under ZeRO-3 and in 4 bits, adapters are added inside the kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.spec import RunPlan
from launcher.training import processors
from launcher.training.backbone import language_of
from launcher.training.batching import MicroBatch, collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.fused import layer
from launcher.training.pixels import Pixels
from tests.groups import GROUPS
from tests.test_fused import LORA
from tests.tiny import tiny_plan

pytestmark = pytest.mark.gpu

QLORA = {**LORA, "name": "qlora"}
FULL: dict[str, Any] = {}
TUNES = {"lora": LORA, "lora of rank 40": {**LORA, "r": 40}, "qlora": QLORA, "full": FULL}
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "head_dim": 128}
ROPE = {"rope_type": "default", "rope_theta": 10000, "mrope_section": [24, 20, 20], "mrope_interleaved": True}

Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


@pytest.mark.parametrize("tune", TUNES)
def test_scores_and_gradients_are_those_of_transformers_layers(tune: str, tmp_path: Path) -> None:
    found: dict[str, Found] = {}
    for kernels in ("plain", "fused"):
        scorer, batch = _ready(_plan(tmp_path, TUNES[tune], kernels))
        found[kernels] = _scores_and_gradients(scorer, batch)
    if tune.startswith("lora"):
        layer.lay_together(language_of(scorer.core))
        found["weights laid together"] = _scores_and_gradients(scorer, batch)
    scores, gradients = found.pop("plain")
    assert scores.std() > 1e-3 and any("layers.0" in name for name in gradients)
    for way, (ours, theirs) in found.items():
        assert _error(ours, scores) < 1e-4, way
        assert theirs.keys() == gradients.keys()
        # 2e-4: what the order of sums makes of small gradients of norms; a kernel's fault is 1e-2 and more.
        assert {name for name, wanted in gradients.items() if not _error(theirs[name], wanted) < 2e-4} == set(), way


def _plan(folder: Path, tune: dict[str, Any], kernels: str) -> RunPlan:
    plan = tiny_plan(folder, tune=tune, train={"kernels": kernels})
    plan.arch["text_config"] |= WIDE | {"rope_parameters": ROPE}
    plan.arch["vision_config"]["out_hidden_size"] = WIDE["hidden_size"]
    return plan


def _ready(plan: RunPlan) -> tuple[Any, MicroBatch]:
    processor, device = processors.load_processor(plan), torch.device("cuda")
    scorer = build_scorer(plan, processor, device).to(device).train()
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in scorer.named_parameters():
        if "lora_B" in name:  # zeros at the start, behind which A has no gradient
            parameter.data.normal_(std=0.1, generator=generator)
    encoder, pixels = make_encoder(plan, processor), Pixels(processor)
    encoded = [encoder.encode(group) for group in GROUPS["mixed"]]
    needed = {slot.key: pixels.rows(slot) for one in encoded for prompt in one.prompts for slot in prompt.media}
    units = make_units(encoded, plan.cost, 8192, splittable=False)
    return scorer, collate(encoded, units, needed, padded=True).to(device)


def _scores_and_gradients(scorer: Any, batch: MicroBatch) -> Found:
    scores = scorer(batch)
    (scores * torch.linspace(-1, 1, len(scores), device=scores.device)).sum().backward()
    found = {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
    scorer.zero_grad(set_to_none=True)
    return scores.detach(), found


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-12))
