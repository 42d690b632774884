"""DeepSpeed on GPUs against a plain torch loop on the CPU, and the ZeRO stages against one another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.processes.zero_cases import GPU_RUNS, STAGES, make_case
from tests.zero_support import plain_loop, start, write_base

RUNS = [pytest.param(*run, marks=pytest.mark.gpu(run[2])) for run in GPU_RUNS]
FP32 = [run for run in RUNS if "bf16" not in run.values[0]]
BF16 = [run for run in RUNS if "bf16" in run.values[0]]

Outcomes = Callable[[int], Path]
Reference = Callable[[str], tuple[dict[str, list[float]], dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Number of ranks -> folder of what came out of every case; started when first asked for."""
    folders: dict[int, Path] = {}

    def run(ranks: int) -> Path:
        if ranks not in folders:
            folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
            write_base(folders[ranks])
            start(ranks, folders[ranks], cases="gpu", device="cuda")
        return folders[ranks]

    return run


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Case -> numbers and parameters of the plain float32 loop."""
    known: dict[str, Any] = {}

    def run(name: str) -> Any:
        plain = "lora" if name.startswith("lora") else "full, one micro-batch"
        if plain not in known:
            known[plain] = plain_loop(make_case(tmp_path_factory.mktemp("plain"), plain, 0, 1))
        return known[plain]

    return run


def numbers_of(outcomes: Outcomes, name: str, stage: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((outcomes(ranks) / f"{name}, stage {stage}, ranks {ranks}.json").read_text())
    assert found["micro_batches"][0] > 1  # else accumulation shows nothing
    return found


@pytest.mark.parametrize(("name", "stage", "ranks"), FP32)
def test_float32_equals_the_plain_loop(
    outcomes: Outcomes, reference: Reference, name: str, stage: int, ranks: int
) -> None:
    numbers = numbers_of(outcomes, name, stage, ranks)
    wanted, expected = reference(name)
    # Two orders of summation in float32. TF32 anywhere (10 bits of mantissa) would show at the first step.
    assert numbers["loss"][0] == pytest.approx(wanted["loss"][0], abs=1e-5)
    assert numbers["loss"] == pytest.approx(wanted["loss"], abs=1e-4)
    if stage > 0:  # DeepSpeed gives no gradient norm for float32 in stage 0
        assert numbers["norm"][0] == pytest.approx(wanted["norm"][0], rel=1e-4)
        assert numbers["norm"] == pytest.approx(wanted["norm"], rel=1e-3)
    weights = load_file(outcomes(ranks) / f"{name}, stage {stage}, ranks {ranks}.safetensors")
    same = total = 0
    for parameter, value in expected.items():
        difference = (weights[parameter] - value).abs()
        # A vanishing gradient's sign is noise, and Adam's first steps are the rate (1e-3) times that sign.
        assert difference.max() <= 6.1e-3, parameter
        same += int((difference <= 2e-5).sum())
        total += value.numel()
    assert total > 100_000 and same / total > 0.98


@pytest.mark.parametrize(("name", "stage", "ranks"), BF16)
def test_bf16_follows_float32(outcomes: Outcomes, reference: Reference, name: str, stage: int, ranks: int) -> None:
    """bf16 rounds to 8 bits, 0.4 % a value at worst: what four layers make of it before any update is small beside
    what a lost micro-batch, a wrong mean or a missing image would do (10 % and more). After an update the bound is
    wide: Adam turns noise in tiny gradients into steps of the full rate."""
    numbers = numbers_of(outcomes, name, stage, ranks)
    wanted, _ = reference(name)
    assert numbers["loss"][0] == pytest.approx(wanted["loss"][0], abs=5e-3)
    assert numbers["norm"][0] == pytest.approx(wanted["norm"][0], rel=3e-2)
    assert numbers["loss"] == pytest.approx(wanted["loss"], abs=0.1)
    assert numbers["norm"] == pytest.approx(wanted["norm"], rel=0.15)


@pytest.mark.gpu(2)
def test_stages_agree(outcomes: Outcomes, capsys: pytest.CaptureFixture[str]) -> None:
    """The same gradients from stages 1, 2 and 3 as ds_configs/ has them, over micro-batches of unequal lengths.

    The first three steps leave the weights as they are: their forward passes are the same computation, and their
    gradients differ by the order of sums and by flash attention's atomics. The other settings of overlap_comm are
    shown; a user may choose them.
    """
    *rows, refused = json.loads((outcomes(2) / "stages.json").read_text())
    with capsys.disabled():
        print("\n" + stages_table(rows, refused))
    first = rows[0]
    assert len(rows) == len(STAGES)
    assert first["micro_batches"][0] > 1 and len({sum(tokens) for tokens in first["tokens"][0]}) == 2
    for (_, overlap), row in zip(STAGES, rows, strict=True):
        if overlap is not None:
            continue
        where = f"stage {row['stage']}, overlap_comm {row['overlap_comm']}"
        assert row["loss"][:4] == pytest.approx(first["loss"][:4], abs=2e-3), where
        assert row["norm"][:4] == pytest.approx(first["norm"][:4], rel=1e-2), where
        assert row["loss"][4:] == pytest.approx(first["loss"][4:], abs=5e-2), where
    assert refused["stage"] == 1 and "overlap_comm" in refused["refused"]


def stages_table(rows: list[dict[str, Any]], refused: dict[str, Any]) -> str:
    steps = range(1, len(rows[0]["loss"]) + 1)
    head = f"{'stage':5}  {'overlap_comm':12}  {'':4}" + "".join(f"  {'step ' + str(step):>10}" for step in steps)
    lines = [head]
    for row in rows:
        for name in ("loss", "norm"):
            left = f"{row['stage']:5}  {row['overlap_comm']!s:12}" if name == "loss" else " " * 19
            lines.append(f"{left}  {name:4}" + "".join(f"  {value:10.6f}" for value in row[name]))
    lines.append(f"{refused['stage']:5}  {refused['overlap_comm']!s:12}  refused: {refused['refused']}")
    return "\n".join(lines)
