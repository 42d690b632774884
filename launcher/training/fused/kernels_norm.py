"""RMSNorm, the sum before it, and its gradient: a program holds one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher.training.fused.kernels_add import add
from launcher.training.fused.kernels_common import power_of_two, rows_of
from launcher.training.fused.ops import Low, new_rows

ELEMENTS_A_THREAD = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, spare: int = 0) -> tuple[Tensor, Tensor]:
    """As ops.rms_norm."""
    x, (tokens, size) = rows_of(x), x.shape
    y, rstd = new_rows(x, size, spare), _statistics(x)
    if tokens:
        block, strides = power_of_two(size), (x.stride(0), y.stride(0))
        _rms_norm[(tokens,)](x, weight, y, rstd, *strides, eps, H=size, BLOCK=block, num_warps=_warps(block))
    return y, rstd


def add_norm(
    x: Tensor, delta: Tensor, low: Low | None, weight: Tensor, eps: float, *, spare: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """As ops.add_norm."""
    if low is not None:
        # In two passes: a tensor core takes 16 rows at least, and a program that held so many would read them twice.
        total = add(x, delta, low)
        return total, *rms_norm(total, weight, eps, spare=spare)
    x, delta, (tokens, size) = rows_of(x), rows_of(delta), x.shape
    total, y, rstd = new_rows(x, size, 0), new_rows(x, size, spare), _statistics(x)
    if tokens:
        block, strides = power_of_two(size), (x.stride(0), delta.stride(0), y.stride(0))
        _add_norm[(tokens,)](
            x, delta, weight, total, y, rstd, *strides, eps, H=size, BLOCK=block, num_warps=_warps(block)
        )
    return total, y, rstd


def norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None, *, spare: int = 0
) -> Tensor:
    """As ops.norm_backward."""
    dy, x, (tokens, size) = rows_of(dy), rows_of(x), x.shape
    dx, plus = new_rows(x, size, spare), x if residual is None else rows_of(residual)
    if tokens:
        block, strides = power_of_two(size), (dy.stride(0), x.stride(0), plus.stride(0), dx.stride(0))
        tensors, added = (dy, x, rstd, weight, plus, dx), residual is not None
        _norm_backward[(tokens,)](*tensors, *strides, RESIDUAL=added, H=size, BLOCK=block, num_warps=_warps(block))
    return dx


def _statistics(x: Tensor) -> Tensor:
    return torch.empty(len(x), dtype=torch.float32, device=x.device)


def _warps(block: int) -> int:
    return min(max(block // (32 * ELEMENTS_A_THREAD), 1), 16)


@triton.jit
def _rms_norm(x, weight, y, rstd, x_row, y_row, eps, H: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    wide = tl.load(x + row * x_row + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    tl.store(rstd + row, inverse)
    tl.store(y + row * y_row + cols, (wide * inverse * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, delta, weight, total, y, rstd, x_row, delta_row, y_row, eps, H: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    wide = tl.load(x + row * x_row + cols, mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(delta + row * delta_row + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    rounded = wide.to(total.dtype.element_ty)
    tl.store(total + row * H + cols, rounded, mask=inside)
    wide = rounded.to(tl.float32)  # what the layer's other half sees
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    tl.store(rstd + row, inverse)
    tl.store(y + row * y_row + cols, (wide * inverse * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    dy,
    x,
    rstd,
    weight,
    residual,
    dx,
    dy_row,
    x_row,
    residual_row,
    dx_row,
    RESIDUAL: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    slope = tl.load(dy + row * dy_row + cols, mask=inside, other=0.0).to(tl.float32)
    unit = tl.load(x + row * x_row + cols, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.load(rstd + row)
    scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    slope *= scale
    unit *= inverse
    result = inverse * (slope - unit * (tl.sum(slope * unit, axis=0) / H))
    if RESIDUAL:
        result += tl.load(residual + row * residual_row + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + row * dx_row + cols, result.to(dx.dtype.element_ty), mask=inside)
