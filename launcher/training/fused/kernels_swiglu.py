"""SwiGLU and its gradient.

A program makes tiles one below another: of a product of low rank it then reads `b` once, and while it computes one tile
the elements of the next are on their way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from launcher.training.fused.kernels_common import Tile, dot, load, load_b, low_args, rows_of
from launcher.training.fused.ops import Low, new_rows

FORWARD, FORWARD_LOW = Tile(4, 512, 4), Tile(64, 64, 8, 8)
BACKWARD, BACKWARD_LOW = Tile(4, 512, 8), Tile(32, 64, 8, 8)


def swiglu(gate_up: Tensor, low: Low | None, *, spare: int = 0) -> Tensor:
    """As ops.swiglu."""
    gate_up, tokens, size = rows_of(gate_up), len(gate_up), gate_up.shape[1] // 2
    act = new_rows(gate_up, size, spare)
    if not tokens:
        return act
    args, tile = low_args(low, gate_up), (FORWARD if low is None else FORWARD_LOW).fit(size)
    _swiglu[(tile.programs(tokens, size),)](
        gate_up,
        act,
        gate_up.stride(0),
        act.stride(0),
        *args.values,
        tokens,
        F=size,
        RANK=args.rank,
        RANKS=args.block,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEPS=tile.steps,
        num_warps=tile.warps,
        num_stages=1,
    )
    return act


def swiglu_backward(dact: Tensor, gate_up: Tensor, low: Low | None) -> tuple[Tensor, Tensor]:
    """As ops.swiglu_backward."""
    if dact.stride(-1) != 1 or gate_up.stride(-1) != 1:
        raise ValueError("swiglu_backward writes in place: the elements of a row must be side by side")
    tokens, size = dact.shape
    if not tokens:
        return dact, gate_up
    args, tile = low_args(low, dact), (BACKWARD if low is None else BACKWARD_LOW).fit(size)
    _swiglu_backward[(tile.programs(tokens, size),)](
        dact,
        gate_up,
        dact.stride(0),
        gate_up.stride(0),
        *args.values,
        tokens,
        F=size,
        RANK=args.rank,
        RANKS=args.block,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEPS=tile.steps,
        num_warps=tile.warps,
        num_stages=1,
    )
    return dact, gate_up


@triton.jit(do_not_specialize=["tokens"])
def _swiglu(  # type: ignore[no-untyped-def]
    gate_up,
    act,
    gate_up_row,
    act_row,
    h_ptr,
    b_ptr,
    h_row,
    b_row,
    b_rank,
    tokens,
    F: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    across: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // across * (ROWS * STEPS)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    in_cols = cols < F
    offsets = rows * gate_up_row + cols[None, :]
    inside = (rows < tokens - first) & in_cols[None, :]
    gate = load(gate_up, gate_up_row, first, offsets, inside)
    up = load(gate_up, gate_up_row, first, offsets + F, inside)
    if RANK > 0:
        ranks = tl.arange(0, RANKS)[None, :]
        h = load(h_ptr, h_row, first, rows * h_row + ranks, (rows < tokens - first) & (ranks < RANK))
        b_gate = load_b(b_ptr, b_row, b_rank, cols, in_cols, RANK, RANKS)
        b_up = load_b(b_ptr, b_row, b_rank, cols + F, in_cols, RANK, RANKS)
    for step in range(STEPS):
        here, here_inside = first, inside
        wide, wide_up = gate.to(tl.float32), up.to(tl.float32)
        if RANK > 0:
            h_here = h
        if STEPS > 1:
            first += ROWS
            left = tl.where(step + 1 < STEPS, tokens - first, 0)
            inside = (rows < left) & in_cols[None, :]
            gate = load(gate_up, gate_up_row, first, offsets, inside)
            up = load(gate_up, gate_up_row, first, offsets + F, inside)
            if RANK > 0:
                h = load(h_ptr, h_row, first, rows * h_row + ranks, (rows < left) & (ranks < RANK))
        if RANK > 0:
            wide += dot(h_here, b_gate)
            wide_up += dot(h_here, b_up)
        result = (wide * tl.sigmoid(wide) * wide_up).to(act.dtype.element_ty)
        tl.store(act + here.to(tl.int64) * act_row + rows * act_row + cols[None, :], result, mask=here_inside)


@triton.jit(do_not_specialize=["tokens"])
def _swiglu_backward(  # type: ignore[no-untyped-def]
    dact,
    gate_up,
    dact_row,
    gate_up_row,
    h_ptr,
    b_ptr,
    h_row,
    b_row,
    b_rank,
    tokens,
    F: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    across: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // across * (ROWS * STEPS)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    in_cols = cols < F
    at, at_gate = rows * dact_row + cols[None, :], rows * gate_up_row + cols[None, :]
    inside = (rows < tokens - first) & in_cols[None, :]
    slope = load(dact, dact_row, first, at, inside)
    gate = load(gate_up, gate_up_row, first, at_gate, inside)
    up = load(gate_up, gate_up_row, first, at_gate + F, inside)
    if RANK > 0:
        ranks = tl.arange(0, RANKS)[None, :]
        h = load(h_ptr, h_row, first, rows * h_row + ranks, (rows < tokens - first) & (ranks < RANK))
        b_gate = load_b(b_ptr, b_row, b_rank, cols, in_cols, RANK, RANKS)
        b_up = load_b(b_ptr, b_row, b_rank, cols + F, in_cols, RANK, RANKS)
    kind = dact.dtype.element_ty
    for step in range(STEPS):
        here, here_inside = first.to(tl.int64), inside
        dwide, wide, wide_up = slope.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
        if RANK > 0:
            h_here = h
        if STEPS > 1:
            first += ROWS
            left = tl.where(step + 1 < STEPS, tokens - first, 0)
            inside = (rows < left) & in_cols[None, :]
            slope = load(dact, dact_row, first, at, inside)
            gate = load(gate_up, gate_up_row, first, at_gate, inside)
            up = load(gate_up, gate_up_row, first, at_gate + F, inside)
            if RANK > 0:
                h = load(h_ptr, h_row, first, rows * h_row + ranks, (rows < left) & (ranks < RANK))
        if RANK > 0:
            wide += dot(h_here, b_gate)
            wide_up += dot(h_here, b_up)
        gate_open = tl.sigmoid(wide)
        silu = wide * gate_open
        place = gate_up + here * gate_up_row + at_gate
        tl.store(dact + here * dact_row + at, (silu * wide_up).to(kind), mask=here_inside)
        tl.store(place, (dwide * wide_up * (gate_open + silu * (1 - gate_open))).to(kind), mask=here_inside)
        tl.store(place + F, (dwide * silu).to(kind), mask=here_inside)
