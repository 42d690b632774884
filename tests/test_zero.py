"""Real DeepSpeed on two CPU processes against a plain torch loop on one: losses, gradient norms, parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.processes.zero_cases import RUNS, SCORED, make_case
from tests.zero_support import plain_loop


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (numbers, parameters) of a plain loop: one batch, torch's clipping and AdamW, no DeepSpeed."""
    known: dict[str, Any] = {}

    def run(name: str) -> Any:
        name = name.replace(", weights from files", "")  # the same weights, built
        name = name.rpartition("_offload, ")[2]  # the same model and steps
        name = "full, small micro-batches" if name.endswith("_offload") else name
        if name not in known:
            known[name] = plain_loop(make_case(tmp_path_factory.mktemp("plain"), name, 0, 1))
        return known[name]

    return run


@pytest.mark.parametrize(("name", "stage", "ranks"), [run for run in RUNS if "bf16" not in run[0]])
def test_same_as_a_plain_loop(outcomes: Path, reference: Any, name: str, stage: int, ranks: int) -> None:
    """Z01 to Z05, Z07, Z10, Z19, G04, and G07: the loss that is logged is the whole batch's."""
    key = f"{name}, stage {stage}, ranks {ranks}"
    numbers, weights = json.loads((outcomes / f"{key}.json").read_text()), load_file(outcomes / f"{key}.safetensors")
    wanted, expected = reference(name)
    assert numbers["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    if stage > 0:  # DeepSpeed gives no gradient norm for float32 in stage 0
        assert numbers["norm"] == pytest.approx(wanted["norm"], rel=1e-4)
    if name == "a slow rank":
        fast, slow = (sum(sum(step[rank]) for step in numbers["tokens"]) for rank in (0, 1))
        assert numbers["speeds"][1] < numbers["speeds"][0] == 1.0 and fast > slow
    if stage == 3:  # every rank runs the tower where one may have to
        assert numbers["always_see"] == (name not in ("words alone", "text only"))
    if "small" in name or "offload" in name:
        assert numbers["micro_batches"][0] > 1  # else the case shows nothing
    moved = 0
    for parameter, value in expected.items():
        # A vanishing gradient's sign is noise, and Adam's first steps are the rate times that sign.
        torch.testing.assert_close(
            weights[parameter], value, atol=2e-4, rtol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}"
        )
        apart = int(((weights[parameter] - value).abs() > 1e-5).sum())
        assert apart <= max(1, 0.02 * value.numel()), parameter
        moved += int(value.numel())
    assert moved > 100_000


def test_scores_are_equal_in_every_stage(outcomes: Path) -> None:
    """Z12: an evaluation generates nothing, and every rank runs as many micro-batches as the others."""
    one, *others = (
        json.loads((outcomes / f"lora, stage {stage}, ranks {ranks}.json").read_text())["scores"]
        for stage, ranks in ((2, 1), (2, 2), (3, 2))
    )
    assert len(one) == SCORED and len({len(scores) for scores in one}) > 1
    for scores in others:
        for row, wanted in zip(scores, one, strict=True):
            assert row == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(("name", "stage", "ranks"), [run for run in RUNS if "bf16" in run[0]])
def test_bf16_follows_float32(outcomes: Path, reference: Any, name: str, stage: int, ranks: int) -> None:
    numbers = json.loads((outcomes / f"{name}, stage {stage}, ranks {ranks}.json").read_text())
    wanted, _ = reference("full, one micro-batch")
    assert numbers["loss"][0] == pytest.approx(wanted["loss"][0], abs=5e-3)  # before any update
    assert numbers["norm"][0] == pytest.approx(wanted["norm"][0], rel=3e-2)
    assert numbers["loss"] == pytest.approx(wanted["loss"], abs=0.1)  # Adam turns noise in tiny gradients into steps
    assert numbers["moments"] == ["torch.bfloat16" if "states" in name else "torch.float32"]


def test_bf16_masters_lose_small_updates() -> None:
    """Why zero=stage2_bf16_states warns: a step of 1e-5 on a weight of 0.02 rounds away, however often it is made."""
    weights = [torch.nn.Parameter(torch.full((64,), 0.02, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    begun = [weight.detach().clone() for weight in weights]
    for weight in weights:  # an optimizer for each: they are of two formats
        optimizer = torch.optim.AdamW([weight], lr=1e-5, weight_decay=0.0, fused=True)
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert weights[0].equal(begun[0])
    assert torch.allclose(weights[1], begun[1] - 20e-5)
