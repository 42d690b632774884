"""The vision tower's Triton kernels against plain torch: interpreted where no GPU is, compiled where one is."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.training import vision_kernels, vision_ops

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"  # tests/conftest.py sets it
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 4e-2}  # bf16: a step of the format at 4, as the interpreter rounds down
KINDS = [torch.float32, torch.bfloat16]


def made(kind: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    """One tensor for the kernel and one for the definition."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(kind)
    return value.to(DEVICE, copy=True), value


def close(got: Tensor, wanted: Tensor) -> None:
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(got.cpu(), wanted, atol=CLOSE[wanted.dtype], rtol=CLOSE[wanted.dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "size"), [(2, 72), (3, 16), (2, 10)])
def test_turn(kind: torch.dtype, heads: int, size: int) -> None:
    ours, plain = made(kind, 9, 3, heads, size)
    (cos, cos_cpu), (sin, sin_cpu) = made(torch.float32, 9, size // 2), made(torch.float32, 10, size // 2)
    sin, sin_cpu = sin[1:], sin_cpu[1:]  # other numbers
    vision_kernels.turn_(ours, cos, sin)
    values = plain[:, 2].clone()
    vision_ops.turn_(plain, cos_cpu, sin_cpu)
    close(ours, plain)
    assert torch.equal(ours[:, 2].cpu(), values)


class Rms(nn.Module):
    """As transformers names it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [lambda width: nn.LayerNorm(width, eps=1e-6), Rms])
@pytest.mark.parametrize("adds", [True, False])
@torch.no_grad()
def test_add_norm(kind: torch.dtype, make: Any, adds: bool) -> None:
    norm = make(24)
    for parameter in norm.parameters():
        parameter += torch.randn(24, generator=torch.Generator().manual_seed(1))
    norm = norm.to(kind)
    (x, x_cpu), (delta, delta_cpu) = made(kind, 7, 24), made(kind, 7, 24)
    wanted = vision_ops.add_norm_(x_cpu, delta_cpu if adds else None, norm)
    weights = [None if w is None else w.to(DEVICE) for w in (norm.weight, getattr(norm, "bias", None))]
    got = vision_kernels.add_norm_(x, delta if adds else None, *weights, 1e-6)
    close(got, wanted)
    close(x, x_cpu)


@pytest.mark.parametrize("kind", KINDS)
def test_silu_times(kind: torch.dtype) -> None:
    (gate, gate_cpu), (up, up_cpu) = made(kind, 7, 300), made(kind, 7, 301)
    close(vision_kernels.silu_times_(gate, up[:, :300].contiguous()), vision_ops.silu_times_(gate_cpu, up_cpu[:, :300]))


@pytest.mark.gpu
def test_the_gelu_of_a_product_is_the_tanh_form() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 256), torch.randn(32, 64)
    inner = F.linear(x, linear.weight, linear.bias)
    forms = [F.gelu(3 * inner, approximate=form) for form in ("tanh", "none")]
    assert (forms[0] - forms[1]).abs().max() > 2e-4  # they can be told apart
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter *= 3
        got = vision_ops.gelu_linear(x.cuda(), linear.cuda()).cpu()
    torch.testing.assert_close(got, forms[0], atol=2e-5, rtol=1e-5)
