"""What the Triton kernels share: tiles, and the product of low rank added to them.

Every kernel reads rows of any stride whose elements lie side by side. Offsets of whole rows are 64 bits wide, since
65,536 tokens of 59,136 elements are more than 32 bits count; offsets inside a tile are 32 bits wide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from launcher.training.fused.ops import Low

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # there bfloat16 is kept as integers, which `dot` multiplies


class Tile(NamedTuple):
    """What a program holds of a result, its warps, and how many such tiles it makes, one below another."""

    rows: int
    columns: int
    warps: int
    steps: int = 1

    def programs(self, tokens: int, size: int) -> int:
        """How many make a result [tokens, size]."""
        return ceil_div(tokens, self.rows * self.steps) * ceil_div(size, self.columns)

    def fit(self, size: int) -> Tile:
        """Not wider than `size` needs; 16 is the least a tensor core takes."""
        return self._replace(columns=min(max(power_of_two(size), 16), self.columns))


class LowArgs(NamedTuple):
    """A `Low` as kernels take it; rank 0 adds nothing."""

    h: Tensor
    b: Tensor
    h_row: int
    b_row: int
    b_rank: int
    rank: int
    block: int  # of ranks: tiles have sides that are powers of two

    @property
    def values(self) -> tuple[Any, ...]:
        """Pointers and strides, in the order in which every kernel takes them."""
        return self[:5]


def low_args(low: Low | None, anything: Tensor) -> LowArgs:
    """Arguments for `low`; without one `anything` stands in for the pointers, which are not followed."""
    if low is None:
        return LowArgs(anything, anything, 0, 0, 0, 0, 0)
    h, b = low
    if h.stride(1) != 1:
        h = h.contiguous()
    return LowArgs(h, b, h.stride(0), b.stride(0), b.stride(1), h.shape[1], max(16, power_of_two(h.shape[1])))


def rows_of(x: Tensor) -> Tensor:
    """`x` [T, D], copied only if the elements of a row are not side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up."""
    return -(-n // d)


@triton.jit
def dot(a, b):  # type: ignore[no-untyped-def]
    """a @ b in float32, of factors of any type."""
    if a.dtype == b.dtype and not INTERPRETED:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


@triton.jit
def load(ptr, row, first, offsets, inside):  # type: ignore[no-untyped-def]
    """A tile that begins at row `first` of a tensor with row stride `row`; zeros outside."""
    return tl.load(ptr + first.to(tl.int64) * row + offsets, mask=inside, other=0.0)


@triton.jit
def load_b(b_ptr, b_row, b_rank, cols, in_cols, RANK: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """b[cols].T, [RANKS, cols]."""
    ranks = tl.arange(0, RANKS)
    inside = in_cols[:, None] & (ranks[None, :] < RANK)
    return tl.trans(tl.load(b_ptr + cols[:, None] * b_row + ranks[None, :] * b_rank, mask=inside, other=0.0))
