"""Flash kernels in bf16 against exact float32 attention on the CPU, and a whole model of them against one without.

Errors are norms of the difference over norms of the wanted: bf16 inputs and outputs leave 0.2 to 0.5 % of noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.attention_needs import KERNELS as NEEDS
from launcher.attention_needs import missing
from launcher.training import processors
from launcher.training.attention import KERNELS, Layout, make_layout, padded_attention
from launcher.training.batching import MicroBatch, collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.losses import LOSSES
from launcher.training.pixels import Pixels
from tests.processes.zero_cases import ALL, BASE, in_bf16
from tests.tiny import tiny_plan
from tests.zero_support import write_base

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
INSTALLED = [name for name in NEEDS if missing(name) is None]
Tensors = list[torch.Tensor]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.detach().float().cpu(), wanted.detach().float().cpu()
    assert got.isfinite().all()
    return float((got - wanted).norm() / wanted.norm())


def compare(ours: Tensors, exact: Tensors, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Value, and the gradients of a random weighting of it."""
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    (got * weight.to(got)).sum().backward()
    (wanted * weight).sum().backward()
    assert relative_error(got, wanted) < 1e-2
    for name, a, b in zip("qkv", ours, exact, strict=True):
        assert b.grad.norm() > 0 and relative_error(a.grad, b.grad) < 1.5e-2, name


def inputs(rows: int, heads: int, shared_heads: int, size: int) -> tuple[Tensors, Tensors]:
    """q, k, v in bf16 on the GPU, and the same numbers in float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(rows, n, size, generator=generator).bfloat16() for n in (heads, shared_heads, shared_heads)]
    return [t.to(DEVICE).requires_grad_() for t in made], [t.float().detach().requires_grad_() for t in made]


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize(("heads", "shared_heads", "size"), [(32, 8, 128), (4, 2, 32)])
def test_shared_prefix_packed(name: str, heads: int, shared_heads: int, size: int) -> None:
    """Two groups of the text workload's shape and a lone prompt in one row, heads as in the 8B and the tiny model."""
    queries, prefixes, at = [], [], 0
    for prefix, documents in ((161, (50, 200, 313, 1)), (64, (400, 37))):
        shared = (at, at + prefix)
        queries.append(shared)
        prefixes.append((at, at))
        at += prefix
        for length in documents:
            queries.append((at, at + length))
            prefixes.append(shared)
            at += length
    queries.append((at, at + 90))
    prefixes.append((at, at))
    ours, exact = inputs(at + 90, heads, shared_heads, size)
    scale = size**-0.5
    got = KERNELS[name](*ours, make_layout(queries, prefixes, padded=False).to(torch.device(DEVICE)), scale)
    wanted = padded_attention(*exact, make_layout(queries, prefixes, padded=True), scale)
    compare(ours, exact, got, wanted)


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize(("heads", "size"), [(16, 72), (4, 16)])
def test_images(name: str, heads: int, size: int) -> None:
    """The vision tower's attention: every patch of an image sees all of that image, heads as in the 8B and the tiny."""
    sizes = [1024, 64, 196]
    bounds = torch.tensor([0, *sizes]).cumsum(0).int()
    ours, exact = inputs(sum(sizes), heads, heads, size)
    layout = Layout(bounds.to(DEVICE), bounds.to(DEVICE), None, max(sizes), max(sizes))
    got = KERNELS[name](*ours, layout, size**-0.5, causal=False)
    images = [[part.transpose(0, 1) for part in image] for image in zip(*(t.split(sizes) for t in exact), strict=True)]
    wanted = torch.cat([torch.nn.functional.scaled_dot_product_attention(*i).transpose(0, 1) for i in images])
    compare(ours, exact, got, wanted)


@pytest.mark.parametrize("name", INSTALLED)
def test_a_whole_model(name: str, tmp_path: Path) -> None:
    """Scores and gradients of packed groups: text, image queries and image documents, with deepstack."""
    write_base(tmp_path)
    model = {"weights": "pretrained", "path": str(tmp_path / BASE)}
    exact = tiny_plan(tmp_path, model=model)
    wanted, expected = scores_and_gradients(exact, torch.device("cpu"), "auto")
    got, gradients = scores_and_gradients(in_bf16(exact), torch.device(DEVICE), name)
    assert relative_error(got, wanted) < 0.1  # a score is a small difference of two products
    assert relative_error(gradients, expected) < 0.1


def scores_and_gradients(plan: Any, device: torch.device, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of every document less their mean, and all gradients of the listwise loss as one vector."""
    from dataclasses import replace

    attention = replace(plan.config.attention, name=kernel)
    plan = replace(plan, config=replace(plan.config, attention=attention))
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, device).to(device)
    batch = everything(plan, processor, padded=scorer.padded).to(device)
    scores = scorer(batch)
    loss = LOSSES["listwise"]
    loss.function(scores, batch.labels, batch.group, plan.config.loss).backward()
    gradients = [p.grad.float().flatten() for p in scorer.parameters() if p.grad is not None]
    assert len(gradients) > 50
    return scores - scores.mean(), torch.cat(gradients)


def everything(plan: Any, processor: Any, *, padded: bool) -> MicroBatch:
    encoder, pixels = make_encoder(plan, processor), Pixels(processor)
    encoded = [encoder.encode(one) for one in ALL]
    units = make_units(encoded, plan.cost, 10**9, splittable=False)
    needed = {s.key: pixels.rows(s) for e in encoded for p in e.prompts for s in p.media}
    batch = collate(encoded, units, needed, padded=padded)
    assert len(batch.grid_thw) > 2  # really several images
    return batch
