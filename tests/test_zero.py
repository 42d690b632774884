"""Real DeepSpeed on two CPU processes against a plain torch loop on one: losses, gradient norms, parameters."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launcher.training import processors
from launcher.training.batching import collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.losses import LOSSES
from launcher.training.pixels import Pixels
from tests.processes.zero_cases import ALL, BASE, RUNS, STEPS, make_case
from tests.tiny import tiny_plan


def start(world: int, out: Path) -> None:
    """Run zero_cases with `world` ranks and wait; a failure shows the ranks' output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    shared |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "tests.processes.zero_cases", str(out)]
    logs = [open(out / f"rank{rank}.log", "w") for rank in range(world)]  # noqa: SIM115
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_SIZE": str(world)},
            stdout=log,
            stderr=log,
        )
        for r, log in enumerate(logs)
    ]
    codes = [rank.wait(timeout=600) for rank in ranks]
    assert codes == [0] * world, "\n".join((out / f"rank{r}.log").read_text()[-3000:] for r in range(world))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zero")
    plan = tiny_plan(out)
    processor = processors.load_processor(plan)
    for part in (build_scorer(plan, processor, torch.device("cpu")).model, processor):
        part.save_pretrained(out / BASE)
    start(1, out)
    start(2, out)
    return out


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (numbers, parameters) of a plain loop: one batch, torch's clipping and AdamW, no DeepSpeed."""
    known: dict[str, Any] = {}

    def run(name: str) -> Any:
        name = name.replace(", weights from files", "")  # the same weights, built
        if name not in known:
            known[name] = _plain_loop(make_case(tmp_path_factory.mktemp("plain"), name, 0, 1))
        return known[name]

    return run


def _plain_loop(plan: Any) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    scorer.train()
    encoder, pixels = make_encoder(plan, processor), Pixels(processor.image_processor)
    trainable = [p for p in scorer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=plan.lr, weight_decay=0.0)
    loss, numbers = LOSSES[plan.config.loss.name], {"loss": [], "norm": []}
    for rows in STEPS:
        encoded = [encoder.encode(ALL[row]) for row in rows]
        units = make_units(encoded, plan.cost, 10**9, splittable=False)
        needed = {s.key: pixels.rows(s) for e in encoded for p in e.prompts for s in p.images}
        batch = collate(encoded, units, needed, padded=True)
        value = loss.function(scorer(batch), batch.labels, batch.group, plan.config.loss)
        value = value / loss.count(len(batch.labels), len(rows))
        optimizer.zero_grad()
        value.backward()
        numbers["norm"].append(float(torch.nn.utils.clip_grad_norm_(trainable, plan.config.optim.max_grad_norm)))
        numbers["loss"].append(value.item())
        optimizer.step()
    return numbers, {name: p.detach().clone() for name, p in scorer.named_parameters()}


@pytest.mark.parametrize(("name", "stage", "ranks"), [run for run in RUNS if run[0] != "bf16"])
def test_same_as_a_plain_loop(outcomes: Path, reference: Any, name: str, stage: int, ranks: int) -> None:
    key = f"{name}, stage {stage}, ranks {ranks}"
    numbers, weights = json.loads((outcomes / f"{key}.json").read_text()), load_file(outcomes / f"{key}.safetensors")
    wanted, expected = reference(name)
    assert numbers["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    if stage > 0:  # DeepSpeed gives no gradient norm for float32 in stage 0
        assert numbers["norm"] == pytest.approx(wanted["norm"], rel=1e-4)
    if "small" in name:
        assert numbers["micro_batches"][0] > 1  # else the case shows nothing
    moved = 0
    for parameter, value in expected.items():
        # A vanishing gradient's sign is noise, and Adam's first steps are the rate times that sign.
        torch.testing.assert_close(
            weights[parameter], value, atol=2e-4, rtol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}"
        )
        close = (weights[parameter] - value).abs() <= 1e-5
        assert close.float().mean() > 0.98, parameter
        moved += int(value.numel())
    assert moved > 100_000


@pytest.mark.parametrize(("name", "stage", "ranks"), [run for run in RUNS if run[0] == "bf16"])
def test_bf16_follows_float32(outcomes: Path, reference: Any, name: str, stage: int, ranks: int) -> None:
    numbers = json.loads((outcomes / f"{name}, stage {stage}, ranks {ranks}.json").read_text())
    wanted, _ = reference("full, one micro-batch")
    assert numbers["loss"][0] == pytest.approx(wanted["loss"][0], abs=5e-3)  # before any update
    assert numbers["norm"][0] == pytest.approx(wanted["norm"][0], rel=3e-2)
    assert numbers["loss"] == pytest.approx(wanted["loss"], abs=0.1)  # Adam turns noise in tiny gradients into steps
