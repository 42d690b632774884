"""Sums over rows of packed tensors, beside attention kernels: Triton on a GPU, plain torch on CPU.

Shapes: T packed rows, K gathered rows, n heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, rows: Tensor) -> None:
    """Merge another call's result [T, n, d] and log-sum-exp [T, n] into the first's, in place, at these rows."""
    if not out.is_cpu:
        return _kernels().merge_(out, lse, other, other_lse, rows)
    first, second = lse[rows], other_lse[rows]
    both = torch.logaddexp(first, second)
    weighted = out[rows] * (first - both).exp()[..., None] + other[rows] * (second - both).exp()[..., None]
    out[rows] = weighted.to(out.dtype)
    lse[rows] = both


def add_(total: Tensor, other: Tensor, rows: Tensor) -> None:
    """Add these rows of `other` [T, n, d] to `total`'s, in place."""
    if not total.is_cpu:
        return _kernels().add_(total, other, rows)
    total[rows] += other[rows]


def sum_rows(
    first: Tensor, second: Tensor, length: int, rows: Tensor, derived: dict[Any, Any]
) -> tuple[Tensor, Tensor]:
    """For both [K, n, d], what gathering `rows` [K] of `length` rows has as its gradient, summed in float32.

    `derived` keeps the order of rows for further layers of the micro-batch.
    """
    if not first.is_cpu:
        if "order" not in derived:
            ascending, order = rows.sort(stable=True)
            begins = torch.searchsorted(ascending, torch.arange(length + 1, device=rows.device))
            derived["order"] = order, begins
        return _kernels().sum_rows(first, second, *derived["order"])
    return _summed(first, length, rows), _summed(second, length, rows)


def _summed(gathered: Tensor, length: int, rows: Tensor) -> Tensor:
    wide = gathered.to(torch.promote_types(gathered.dtype, torch.float32))
    return wide.new_zeros((length, *gathered.shape[1:])).index_add_(0, rows, wide).to(gathered.dtype)


def _kernels() -> Any:
    """Triton takes a while to import, and a machine without a GPU needs none of it."""
    from launcher.training import attention_kernels

    return attention_kernels
