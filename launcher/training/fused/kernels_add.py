"""Sums: each program makes a tile, so that of a product of low rank nothing but `b` is read more than once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher.training.fused.kernels_common import Tile, dot, load, load_b, low_args, rows_of
from launcher.training.fused.ops import Low

PLAIN, LOW = Tile(4, 1024, 8), Tile(64, 64, 8)


def add(x: Tensor, delta: Tensor, low: Low | None) -> Tensor:
    """As ops.add."""
    x, delta, (tokens, size) = rows_of(x), rows_of(delta), x.shape
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not tokens:
        return total
    args, tile = low_args(low, x), (PLAIN if low is None else LOW).fit(size)
    _add[(tile.programs(tokens, size),)](
        x,
        delta,
        total,
        x.stride(0),
        delta.stride(0),
        *args.values,
        tokens,
        D=size,
        RANK=args.rank,
        RANKS=args.block,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
        num_stages=1,
    )
    return total


@triton.jit(do_not_specialize=["tokens"])
def _add(  # type: ignore[no-untyped-def]
    x,
    delta,
    total,
    x_row,
    delta_row,
    h_ptr,
    b_ptr,
    h_row,
    b_row,
    b_rank,
    tokens,
    D: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // across * ROWS
    rows, cols = tl.arange(0, ROWS)[:, None], tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < tokens - first) & (cols < D)[None, :]
    kind = total.dtype.element_ty
    wide = load(x, x_row, first, rows * x_row + cols[None, :], inside).to(tl.float32)
    more = load(delta, delta_row, first, rows * delta_row + cols[None, :], inside).to(tl.float32)
    if RANK > 0:
        ranks = tl.arange(0, RANKS)[None, :]
        h = load(h_ptr, h_row, first, rows * h_row + ranks, (rows < tokens - first) & (ranks < RANK))
        more += dot(h, load_b(b_ptr, b_row, b_rank, cols, cols < D, RANK, RANKS))
        more = more.to(kind).to(tl.float32)
    to = total + first.to(tl.int64) * D + rows * D + cols[None, :]
    tl.store(to, (wide + more).to(kind), mask=inside)
