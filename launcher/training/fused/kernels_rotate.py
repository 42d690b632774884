"""Norm by head and rotary embedding of joined queries, keys and values, and their gradient."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from launcher.training.fused.kernels_common import Tile, low_args, power_of_two, rows_of
from launcher.training.fused.kernels_turn import rotate_backward_kernel, rotate_kernel
from launcher.training.fused.ops import Low, new_rows

Norms = tuple[Tensor, Tensor, float]

# Columns are heads here: those of one program share what is read of cos and sin, and of h.
TILE = Tile(16, 8, 4)


def rotate(
    qkv: Tensor, low: Low | None, norms: Norms | None, cos: Tensor, sin: Tensor, heads: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """As ops.rotate."""
    if qkv.stride(-1) != 1:
        raise ValueError("rotate writes values in place: the elements of a row must be side by side")
    (n, m), tokens, cos, sin = heads, len(qkv), rows_of(cos), rows_of(sin)
    size = qkv.shape[1] // (n + 2 * m)
    q = torch.empty(tokens, n, size, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(tokens, m, size, dtype=qkv.dtype, device=qkv.device)
    values = qkv.unflatten(-1, (n + 2 * m, size))[:, n + m :]
    if not tokens:
        return q, k, values
    args, (weight_q, weight_k, eps) = low_args(low, qkv), norms or (cos, cos, 0.0)
    group = gcd(n, m, TILE.columns)
    turned = n + m if low is None else n + 2 * m
    rotate_kernel[(TILE._replace(columns=group).programs(tokens, turned),)](
        qkv,
        q,
        k,
        weight_q,
        weight_k,
        cos,
        sin,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        eps,
        *args.values,
        tokens,
        QUERIES=n,
        KEYS=m,
        D=size,
        HALF=max(power_of_two(size // 2), 16),
        GROUP=group,
        NORM=norms is not None,
        RANK=args.rank,
        RANKS=args.block,
        ROWS=TILE.rows,
        num_warps=TILE.warps,
        num_stages=1,
    )
    return q, k, values


def rotate_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    low: Low | None,
    norms: Norms | None,
    cos: Tensor,
    sin: Tensor,
    *,
    spare: int = 0,
) -> Tensor:
    """As ops.rotate_backward."""
    dq, dk, dv, qkv, cos, sin = (rows_of(t) for t in (dq, dk, dv, qkv, cos, sin))
    (tokens, n, size), m = dq.shape, dk.shape[1]
    dqkv = new_rows(qkv, qkv.shape[1], spare)
    if not tokens:
        return dqkv
    if norms is None:
        low = None  # turning is linear: what was turned does not matter
    args, (weight_q, weight_k, eps) = low_args(low, qkv), norms or (cos, cos, 0.0)
    group = gcd(n, m, TILE.columns)
    rotate_backward_kernel[(TILE._replace(columns=group).programs(tokens, n + 2 * m),)](
        dq,
        dk,
        dv,
        qkv,
        dqkv,
        weight_q,
        weight_k,
        cos,
        sin,
        dq.stride(0),
        dq.stride(1),
        dk.stride(0),
        dk.stride(1),
        dv.stride(0),
        dv.stride(1),
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        dqkv.stride(0),
        eps,
        *args.values,
        tokens,
        QUERIES=n,
        KEYS=m,
        D=size,
        HALF=max(power_of_two(size // 2), 16),
        GROUP=group,
        NORM=norms is not None,
        RANK=args.rank,
        RANKS=args.block,
        ROWS=TILE.rows,
        num_warps=TILE.warps,
        num_stages=1,
    )
    return dqkv
