"""Triton kernels of launcher.training.attention_rows, which compute in float32.

Shapes: T packed rows, K gathered rows, R rows named, n heads, d head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS = 32  # of a row at a time: with 128 a head, 16 numbers for each of 256 threads
COLUMNS = 4096
NARROW = 1024  # columns where a row of two tensors is summed


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, rows: Tensor) -> None:
    """launcher.training.attention_rows.merge_ for contiguous [T, n, d] and [T, n] in any strides."""
    _, heads, size = out.shape
    block = min(HEADS, triton.next_power_of_2(heads))
    grid = (len(rows), triton.cdiv(heads, block))
    strides = (*lse.stride(), *other_lse.stride())
    columns = triton.next_power_of_2(size)
    _merge[grid](out, lse, other, other_lse, rows, *strides, heads, size, HEADS=block, SIZE=columns, num_warps=8)


def add_(total: Tensor, other: Tensor, rows: Tensor) -> None:
    """launcher.training.attention_rows.add_ for contiguous tensors."""
    width = total[0].numel()
    block = min(COLUMNS, triton.next_power_of_2(width))
    grid = (len(rows), triton.cdiv(width, block))
    _add[grid](total, other, rows, width, COLUMNS=block, num_warps=8)


def sum_rows(first: Tensor, second: Tensor, order: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Row t of each sum [T, n, d] is of the rows order[begins[t] : begins[t + 1]] of `first` and of `second`."""
    shape, width = (len(begins) - 1, *first.shape[1:]), first[0].numel()
    sums = first.new_empty(shape), second.new_empty(shape)
    block = min(NARROW, triton.next_power_of_2(width))
    _sum[(shape[0], triton.cdiv(width, block))](first, second, *sums, order, begins, width, COLUMNS=block)
    return sums


@triton.jit
def _merge(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    out,
    lse,
    other,
    other_lse,
    rows,
    row_stride,
    head_stride,
    other_row_stride,
    other_head_stride,
    heads,
    size,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, SIZE)
    known = head < heads
    place = lse + row * row_stride + head.to(tl.int64) * head_stride
    other_place = other_lse + row * other_row_stride + head.to(tl.int64) * other_head_stride
    first = tl.load(place, mask=known, other=0.0)
    second = tl.load(other_place, mask=known, other=0.0)
    top = tl.maximum(first, second)
    a, b = tl.exp(first - top), tl.exp(second - top)
    total = a + b
    at = (row * heads + head[:, None]) * size + column[None, :]
    mask = known[:, None] & (column[None, :] < size)
    x = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
    mixed = x * (a / total)[:, None] + y * (b / total)[:, None]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=mask)
    tl.store(place, top + tl.log(total), mask=known)


@triton.jit
def _add(total, other, rows, width, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.load(rows + tl.program_id(0)).to(tl.int64) * width + column
    mask = column < width
    both = tl.load(total + at, mask=mask, other=0.0).to(tl.float32) + tl.load(other + at, mask=mask, other=0.0)
    tl.store(total + at, both.to(total.dtype.element_ty), mask=mask)


@triton.jit
def _sum(first, second, first_sum, second_sum, order, begins, width, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    a = tl.zeros((COLUMNS,), tl.float32)
    b = tl.zeros((COLUMNS,), tl.float32)
    for place in range(tl.load(begins + row), tl.load(begins + row + 1)):
        at = tl.load(order + place) * width + column
        a += tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
        b += tl.load(second + at, mask=mask, other=0.0).to(tl.float32)
    at = row.to(tl.int64) * width + column
    tl.store(first_sum + at, a.to(first_sum.dtype.element_ty), mask=mask)
    tl.store(second_sum + at, b.to(second_sum.dtype.element_ty), mask=mask)
