"""Triton kernels of launcher.training.token_loss: logits are read once for what softmax needs, and once to be replaced.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 4  # logits of a row at a time: 32 a thread; of seven pairs the quickest on an H200 in both kernels


def statistics(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """launcher.training.token_loss.statistics for contiguous logits [R, V] of at most 32 bits."""
    rows, columns = logits.shape
    losses, tops, log_sums = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    _statistics[(rows,)](logits, wanted, losses, tops, log_sums, columns, BLOCK=BLOCK, num_warps=WARPS)
    return losses, tops, log_sums


def slope_(logits: Tensor, wanted: Tensor, top: Tensor, log_sum: Tensor, factor: Tensor) -> None:
    """launcher.training.token_loss.slope_ for contiguous logits [R, V]; `factor` may be one number expanded."""
    rows, columns = logits.shape
    grid = (rows, triton.cdiv(columns, BLOCK))
    _slope[grid](logits, wanted, top, log_sum, factor, columns, factor.stride(0), BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _statistics(logits, wanted, losses, tops, log_sums, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    begin = logits + row.to(tl.int64) * columns
    # Not -inf, so that a block of nothing but -inf adds 0 rather than exp(-inf + inf).
    top = tl.full((), -3.0e38, tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        block = tl.load(begin + place, mask=place < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(block, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(block - higher), 0)
        top = higher
    log_sum = tl.log(total)
    chosen = tl.load(begin + tl.load(wanted + row)).to(tl.float32)
    tl.store(losses + row, log_sum - (chosen - top))
    tl.store(tops + row, top)
    tl.store(log_sums + row, log_sum)


@triton.jit
def _slope(logits, wanted, tops, log_sums, factors, columns, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row.to(tl.int64) * columns + place
    block = tl.load(at, mask=place < columns, other=0.0).to(tl.float32)
    share = tl.exp(block - tl.load(tops + row) - tl.load(log_sums + row))
    slope = tl.where(place == tl.load(wanted + row), share - 1.0, share) * tl.load(factors + row * stride)
    tl.store(at, slope.to(logits.dtype.element_ty), mask=place < columns)
