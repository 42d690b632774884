"""Triton kernels of launcher.training.vision_ops, for the same arguments.

Shapes: P patches, H width, n heads, d head size. Offsets are 64-bit where a large micro-batch would leave 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty_like

PAIRS = 1024  # pairs of numbers that one program turns
GATES = 2048  # numbers that one program gates


@triton.jit
def turn_kernel(  # type: ignore[no-untyped-def]
    qkv, cos, sin, runs, HEADS: tl.constexpr, HALF: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr
):
    """Runs of pairs that lie side by side, so that they are read at once: over patches, then the heads of queries and
    keys, then half a head."""
    run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, left = run // (2 * HEADS * HALF // RUN), run % (2 * HEADS * HALF // RUN)
    head, start = left // (HALF // RUN), left % (HALF // RUN) * RUN
    lane = tl.arange(0, RUN)[None, :]
    inside = (run < runs)[:, None]
    first = qkv + (row.to(tl.int64) * (6 * HEADS * HALF) + head * (2 * HALF) + start)[:, None] + lane
    angle = (row * HALF + start)[:, None] + lane
    a = tl.load(first, mask=inside).to(tl.float32)
    b = tl.load(first + HALF, mask=inside).to(tl.float32)
    c = tl.load(cos + angle, mask=inside)
    s = tl.load(sin + angle, mask=inside)
    tl.store(first, (a * c - b * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(first + HALF, (b * c + a * s).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    x, delta, out, weight, bias, width, eps, ADD: tl.constexpr, RMS: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program; the sum is rounded before it is normed, as it is when it is a tensor of its own."""
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = x.dtype.element_ty
    row = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        row += tl.load(delta + start + column, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(kind)
        tl.store(x + start + column, rounded, mask=inside)
        row = rounded.to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if RMS:
        rstd = tl.rsqrt(tl.sum(row * row, 0) / width + eps)
        normed = scale * (row * rstd).to(kind).to(tl.float32)
    else:
        centred = tl.where(inside, row - tl.sum(row, 0) / width, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        normed = centred * rstd * scale + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + column, normed.to(kind), mask=inside)


@triton.jit
def silu_times_kernel(gate, up, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Element by element; SiLU is rounded before the product, as it is when it is a tensor of its own."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    kind = gate.dtype.element_ty
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    open_ = (g * tl.sigmoid(g)).to(kind).to(tl.float32)
    tl.store(gate + at, (open_ * tl.load(up + at, mask=inside).to(tl.float32)).to(kind), mask=inside)


def turn_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As vision_ops.turn_."""
    patches, _, heads, size = qkv.shape
    run = min(8, size // 2 & -(size // 2))  # the largest power of two in half a head, 16 bytes at most
    runs = patches * heads * size // run  # queries and keys, half of their numbers each
    block = PAIRS // run
    turn_kernel[(triton.cdiv(runs, block),)](qkv, cos, sin, runs, heads, size // 2, run, BLOCK=block)


def add_norm_(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As vision_ops.add_norm_; without `bias` it is an RMSNorm."""
    out, width = empty_like(x), x.shape[1]
    add_norm_kernel[(len(x),)](
        x,
        x if delta is None else delta,
        out,
        weight,
        weight if bias is None else bias,
        width,
        eps,
        ADD=delta is not None,
        RMS=bias is None,
        BLOCK=triton.next_power_of_2(width),
    )
    return out


def silu_times_(gate: Tensor, up: Tensor) -> Tensor:
    """As vision_ops.silu_times_."""
    silu_times_kernel[(triton.cdiv(gate.numel(), GATES),)](gate, up, gate.numel(), BLOCK=GATES)
    return gate
