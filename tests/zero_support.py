"""DeepSpeed's ranks started as the tests of ZeRO need them, and the plain loop that they are held to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from launcher.training import processors
from launcher.training.batching import collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.losses import loss_of
from launcher.training.pixels import Pixels
from tests.processes.zero_cases import BASE, rows_for, steps_for
from tests.tiny import tiny_plan


def start(world: int, out: Path, *, cases: str = "cpu", device: str = "cpu") -> None:
    """Run zero_cases with `world` ranks and wait; a failure shows the ranks' output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    shared |= {"OMP_NUM_THREADS": "1"} | ({"DS_ACCELERATOR": "cpu"} if device == "cpu" else {})
    command = [sys.executable, "-m", "tests.processes.zero_cases", str(out), cases, device]
    paths = [out / f"rank{rank}of{world}.log" for rank in range(world)]
    logs = [open(path, "w") for path in paths]  # noqa: SIM115
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_SIZE": str(world)},
            stdout=log,
            stderr=log,
        )
        for r, log in enumerate(logs)
    ]
    codes = _wait_for_all(ranks)
    assert codes == [0] * world, "\n".join(path.read_text()[-3000:] for path in paths)


def _wait_for_all(ranks: list[subprocess.Popen[bytes]], timeout_s: float = 600) -> list[int]:
    """Exit codes; once a rank has failed the others, which may wait for it for ever, are ended."""
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.returncode for rank in ranks) or timeout_s <= 0:
                break
            try:
                next(rank for rank in ranks if rank.returncode is None).wait(timeout=1)
            except subprocess.TimeoutExpired:
                timeout_s -= 1
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.wait() for rank in ranks]


def write_base(out: Path) -> None:
    """Weights and tokenizer of the tiny model that runs with "weights from files" begin with."""
    plan = tiny_plan(out)
    processor = processors.load_processor(plan)
    for part in (build_scorer(plan, processor, torch.device("cpu")).model, processor):
        part.save_pretrained(out / BASE)


def plain_loop(plan: Any) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Numbers and parameters of three steps on the CPU: one batch, torch's clipping and AdamW, no DeepSpeed."""
    plain = replace(plan.config.train, kernels="plain")
    plan = replace(plan, config=replace(plan.config, train=plain))
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    scorer.train()
    encoder, pixels = make_encoder(plan, processor), Pixels(processor)
    trainable = [p for p in scorer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=plan.lr, weight_decay=0.0)
    loss, numbers = loss_of(plan.config), {"loss": [], "norm": []}
    groups = rows_for(plan)
    for rows in steps_for(plan):
        encoded = [encoder.encode(groups[row]) for row in rows]
        units = make_units(encoded, plan.cost, 10**9, splittable=False)
        needed = {s.key: pixels.rows(s) for e in encoded for p in e.prompts for s in p.media}
        batch = collate(encoded, units, needed, padded=True)
        value = loss(scorer(batch), batch, plan.config.loss)
        value = value / loss.count(len(batch.labels), len(rows), len(batch.predicted))
        optimizer.zero_grad()
        value.backward()
        numbers["norm"].append(float(torch.nn.utils.clip_grad_norm_(trainable, plan.config.optim.max_grad_norm)))
        numbers["loss"].append(value.item())
        optimizer.step()
    return numbers, {name: p.detach().clone() for name, p in scorer.named_parameters()}
