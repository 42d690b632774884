"""Gradients of the weights of norms: each program sums some rows, and their sums are added afterwards.

Nothing is added by whoever comes first: results are the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher.training.fused.kernels_common import Tile, ceil_div, load, power_of_two, rows_of

WHOLE, HEADS = Tile(4, 512, 4), Tile(16, 0, 4)
MOST_SUMS = 128  # rows of sums, of which each takes as many steps as it must


def norm_weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """As ops.norm_weight_gradient."""
    dy, x, (tokens, size) = rows_of(dy), rows_of(x), x.shape
    tile = WHOLE.fit(size)
    steps = ceil_div(tokens, tile.rows * MOST_SUMS)
    tile = tile._replace(steps=max(steps, 1))
    sums = torch.empty(ceil_div(tokens, tile.rows * tile.steps), size, dtype=torch.float32, device=x.device)
    if tokens:
        strides, columns = (dy.stride(0), x.stride(0)), tile.columns
        _norm_weight[(tile.programs(tokens, size),)](
            dy,
            x,
            rstd,
            sums,
            *strides,
            tokens,
            tile.steps,
            H=size,
            ROWS=tile.rows,
            COLUMNS=columns,
            num_warps=tile.warps,
        )
    return sums.sum(dim=0)


def head_norm_weight_gradient(dturned: Tensor, raw: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """As ops.head_norm_weight_gradient."""
    dturned, raw, cos, sin = (rows_of(t) for t in (dturned, raw, cos, sin))
    tokens, heads, size = raw.shape
    sums = torch.empty(ceil_div(tokens, HEADS.rows), size, dtype=torch.float32, device=raw.device)
    if tokens:
        _head_norm_weight[(len(sums),)](
            dturned,
            raw,
            cos,
            sin,
            sums,
            *dturned.stride()[:2],
            *raw.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            eps,
            tokens,
            heads,
            D=size,
            HALF=max(power_of_two(size // 2), 16),
            ROWS=HEADS.rows,
            num_warps=HEADS.warps,
        )
    return sums.sum(dim=0)


@triton.jit(do_not_specialize=["tokens", "steps"])
def _norm_weight(  # type: ignore[no-untyped-def]
    dy, x, rstd, sums, dy_row, x_row, tokens, steps, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    across: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    number, rows = tl.program_id(0) // across, tl.arange(0, ROWS)
    cols = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    first, total = number * steps * ROWS, tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for _ in range(steps):
        inside = (rows < tokens - first)[:, None] & (cols < H)[None, :]
        slope = load(dy, dy_row, first, rows[:, None] * dy_row + cols[None, :], inside).to(tl.float32)
        unit = load(x, x_row, first, rows[:, None] * x_row + cols[None, :], inside).to(tl.float32)
        inverse = tl.load(rstd + first + rows, mask=rows < tokens - first, other=0.0)
        total += slope * (unit * inverse[:, None])
        first += ROWS
    tl.store(sums + number * H + cols, tl.sum(total, axis=0), mask=cols < H)


@triton.jit(do_not_specialize=["tokens"])
def _head_norm_weight(  # type: ignore[no-untyped-def]
    dturned,
    raw,
    cos,
    sin,
    sums,
    dturned_row,
    dturned_head,
    raw_row,
    raw_head,
    cos_row,
    sin_row,
    eps,
    tokens,
    heads,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program: all heads of some rows, each head as two halves (kernels_turn)."""
    other: tl.constexpr = D // 2
    number, first = tl.program_id(0), tl.program_id(0) * ROWS
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)
    inside = (rows < tokens - first) & (cols < other)[None, :]
    c = load(cos, cos_row, first, rows * cos_row + cols[None, :], inside).to(tl.float32)
    s = load(sin, sin_row, first, rows * sin_row + cols[None, :], inside).to(tl.float32)
    total, total_two = tl.zeros([ROWS, HALF], dtype=tl.float32), tl.zeros([ROWS, HALF], dtype=tl.float32)
    slope_at, raw_at = rows * dturned_row + cols[None, :], rows * raw_row + cols[None, :]
    for _ in range(heads):
        slope = load(dturned, dturned_row, first, slope_at, inside).to(tl.float32)
        slope_two = load(dturned, dturned_row, first, slope_at + other, inside).to(tl.float32)
        unit = load(raw, raw_row, first, raw_at, inside).to(tl.float32)
        unit_two = load(raw, raw_row, first, raw_at + other, inside).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(unit * unit + unit_two * unit_two, axis=1) / D + eps)[:, None]
        total += (slope * c + slope_two * s) * (unit * inverse)
        total_two += (slope_two * c - slope * s) * (unit_two * inverse)
        dturned += dturned_head
        raw += raw_head
    place = sums + number * D + cols
    tl.store(place, tl.sum(total, axis=0), mask=cols < other)
    tl.store(place + other, tl.sum(total_two, axis=0), mask=cols < other)
