"""What a tuning choice trains, and that everything else stays as it was, byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.families import FAMILIES
from launcher.training import processors
from launcher.training.batching import collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.pixels import Pixels
from launcher.training.tuning import trainable_by_part
from tests.groups import GROUPS
from tests.tiny import tiny_plan

LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen"}
CHOICES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "full": ({}, {"language", "embeddings", "vision", "projector"}),
    "lora": (LORA, {"language"}),
    "lora everywhere": ({**LORA, "vision": "lora", "projector": "lora"}, {"language", "vision", "projector"}),
    "projector": ({"language": "frozen", "vision": "frozen"}, {"projector"}),
    "head": ({"language": "frozen", "vision": "frozen", "projector": "frozen", "head": "full"}, {"head"}),
}


def digests(scorer: Any) -> dict[str, str]:
    return {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in scorer.named_parameters()}


@pytest.mark.parametrize("name", CHOICES)
def test_one_step_moves_what_trains_and_nothing_else(name: str, tmp_path: Path) -> None:
    tune, parts = CHOICES[name]
    plan = tiny_plan(tmp_path, tune=tune)
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    assert set(trainable_by_part(scorer, FAMILIES["qwen3_vl"])) == parts
    encoder, pixels = make_encoder(plan, processor), Pixels(processor.image_processor)
    encoded = [encoder.encode(g) for g in GROUPS["mixed"]]
    needed = {s.key: pixels.rows(s) for e in encoded for p in e.prompts for s in p.images}
    batch = collate(encoded, make_units(encoded, plan.cost, 8192, splittable=False), needed, padded=True)
    before = digests(scorer)
    trainable = {n for n, p in scorer.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in scorer.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):  # a LoRA A has no gradient while its B is zero
        (scorer(batch) * (batch.labels - 0.4)).sum().backward()
        optimizer.step()
    moved = {n for n, digest in digests(scorer).items() if digest != before[n]}
    assert moved <= trainable
    still = trainable - moved
    assert not still, f"no gradient reached {sorted(still)[:5]}"


def test_adapters_begin_equal_whatever_ran_before(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, tune=LORA)
    processor = processors.load_processor(plan)
    first = digests(build_scorer(plan, processor, torch.device("cpu")))
    torch.rand(3)
    assert digests(build_scorer(plan, processor, torch.device("cpu"))) == first


def test_buffers_and_scores_stay_float32_in_bf16(tmp_path: Path) -> None:
    import dataclasses

    plan = dataclasses.replace(tiny_plan(tmp_path, tune=LORA), precision="bf16")
    scorer = build_scorer(plan, processors.load_processor(plan), torch.device("cpu"))
    assert {p.dtype for p in scorer.parameters()} == {torch.bfloat16}
    assert scorer.head_delta.dtype == torch.float32
    assert all(b.dtype == torch.float32 for n, b in scorer.named_buffers() if "inv_freq" in n)
