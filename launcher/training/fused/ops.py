"""What lies between the matrix products of a decoder layer, each in one pass over memory.

On a GPU these are Triton kernels (launcher.training.fused.kernels); on CPU plain torch, which is also what the kernels
are tested against. Every function computes in float32 and rounds its results.

Shapes: T tokens, H hidden size, F inner size of the MLP, n and m heads of queries and of keys, d head size, R ranks of
the adapters joined. A `Low` is what adapters add: `h @ b.T`, h [T, R] and b [D, R] for a result [T, D].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from launcher.kernels import row_stride

# Spare columns: a result [T, D] with them is the left part of an allocation [T, D + spare or more], so that a product
# may take more columns than the result has (launcher.training.fused.projections puts adapters there).


class Low(NamedTuple):
    """A product of low rank, not carried out yet."""

    h: Tensor  # [T, R]
    b: Tensor  # [D, R]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, spare: int = 0) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * weight [T, H] with `spare` columns, 1 / rms(x) [T] float32)."""
    if not x.is_cpu:
        return _kernels().rms_norm(x, weight, eps, spare=spare)
    rstd = _wide(x).square().mean(dim=-1).add(eps).rsqrt()
    return new_rows(x, x.shape[1], spare).copy_(_wide(x) * rstd[:, None] * weight), rstd


def add_norm(
    x: Tensor, delta: Tensor, low: Low | None, weight: Tensor, eps: float, *, spare: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta + low, its RMSNorm with `spare` columns, 1 / rms): one half of a layer ends and the next begins."""
    if not x.is_cpu:
        return _kernels().add_norm(x, delta, low, weight, eps, spare=spare)
    total = add(x, delta, low)
    return total, *rms_norm(total, weight, eps, spare=spare)


def add(x: Tensor, delta: Tensor, low: Low | None) -> Tensor:
    """x + (delta + low, rounded), [T, D].

    x and delta lie on grids, so that many of their sums lie half-way between two numbers; `low` added to the sum would
    push all of these its own way, however small it is.
    """
    if not x.is_cpu:
        return _kernels().add(x, delta, low)
    return (_wide(x) + _plus(delta, low).to(x.dtype)).to(x.dtype)


def norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None, *, spare: int = 0
) -> Tensor:
    """Gradient of x [T, H], with `spare` columns, from that of RMSNorm(x); `residual` [T, H] is added."""
    if not x.is_cpu:
        return _kernels().norm_backward(dy, x, rstd, weight, residual, spare=spare)
    slope = _wide(dy) * weight
    unit = _wide(x) * rstd[:, None]
    dx = rstd[:, None] * (slope - unit * (slope * unit).mean(dim=-1, keepdim=True))
    return new_rows(x, x.shape[1], spare).copy_(dx if residual is None else dx + residual)


def rotate(
    qkv: Tensor,
    low: Low | None,
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, n, d], keys [T, m, d] and values [T, m, d] of `qkv` + low: normed by head (`norms`: weights of
    queries and keys [d], eps), then turned by `cos` and `sin` [T, d].

    Values are written back to `qkv` [T, (n + 2 m) d] and returned as a view; the rest of it stays as it was.
    """
    if not qkv.is_cpu:
        return _kernels().rotate(qkv, low, norms, cos, sin, heads)
    n, m = heads
    full = _plus(qkv, low).unflatten(-1, (n + 2 * m, -1))
    q, k, v = full.split((n, m, m), dim=1)
    if norms is not None:
        q, k = _head_norm(q, norms[0], norms[2])[0], _head_norm(k, norms[1], norms[2])[0]
    values = qkv.unflatten(-1, (n + 2 * m, -1))[:, n + m :]
    if low is not None:
        values.copy_(v)
    return _turn(q, cos, sin).to(qkv.dtype), _turn(k, cos, sin).to(qkv.dtype), values


def rotate_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    low: Low | None,
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    *,
    spare: int = 0,
) -> Tensor:
    """Gradient of qkv [T, (n + 2 m) d], with `spare` columns; `qkv` is as `rotate` left it."""
    if not qkv.is_cpu:
        return _kernels().rotate_backward(dq, dk, dv, qkv, low, norms, cos, sin, spare=spare)
    n, m = dq.shape[1], dk.shape[1]
    dq, dk = _turn(_wide(dq), cos, -sin), _turn(_wide(dk), cos, -sin)
    if norms is not None:
        raw = _plus(qkv, low).unflatten(-1, (n + 2 * m, -1))
        dq = _head_norm_backward(dq, raw[:, :n], norms[0], norms[2])
        dk = _head_norm_backward(dk, raw[:, n : n + m], norms[1], norms[2])
    return new_rows(qkv, qkv.shape[1], spare).copy_(torch.cat((dq, dk, _wide(dv)), dim=1).flatten(1))


def swiglu(gate_up: Tensor, low: Low | None, *, spare: int = 0) -> Tensor:
    """silu(gate) * up [T, F], with `spare` columns, of `gate_up` [T, 2 F] + low."""
    if not gate_up.is_cpu:
        return _kernels().swiglu(gate_up, low, spare=spare)
    gate, up = _plus(gate_up, low).chunk(2, dim=-1)
    return new_rows(gate_up, gate.shape[1], spare).copy_(gate * gate.sigmoid() * up)


def swiglu_backward(dact: Tensor, gate_up: Tensor, low: Low | None) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up [T, F], gradient of gate_up [T, 2 F]) from the gradient of the former.

    The results take the places of `dact` and `gate_up`.
    """
    if not gate_up.is_cpu:
        return _kernels().swiglu_backward(dact, gate_up, low)
    gate, up = _plus(gate_up, low).chunk(2, dim=-1)
    slope, open_ = _wide(dact), gate.sigmoid()
    silu = gate * open_
    dgate_up = torch.cat((slope * up * (open_ + silu * (1 - open_)), slope * silu), dim=-1)
    dact.copy_(silu * up)
    return dact, gate_up.copy_(dgate_up)


def norm_weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of an RMSNorm's weight, [H] float32, from that of its result."""
    if not x.is_cpu:
        return _kernels().norm_weight_gradient(dy, x, rstd)
    return (_wide(dy) * _wide(x) * rstd[:, None]).sum(dim=0)


def head_norm_weight_gradient(dturned: Tensor, raw: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Gradient of the weight of a norm by head, [d] float32; `dturned` and `raw` [T, heads, d]."""
    if not raw.is_cpu:
        return _kernels().head_norm_weight_gradient(dturned, raw, cos, sin, eps)
    slope = _turn(_wide(dturned), cos, -sin)
    rstd = _wide(raw).square().mean(dim=-1, keepdim=True).add(eps).rsqrt()
    return (slope * _wide(raw) * rstd).sum(dim=(0, 1))


def new_rows(like: Tensor, columns: int, spare: int) -> Tensor:
    """Not initialised, [T, columns] with `spare` columns."""
    return like.new_empty(len(like), row_stride(columns, spare))[:, :columns]


def _kernels():  # type: ignore[no-untyped-def]
    import launcher.training.fused.kernels as kernels  # Triton is imported where a GPU is

    return kernels


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _plus(x: Tensor, low: Low | None) -> Tensor:
    return _wide(x) if low is None else torch.addmm(_wide(x), _wide(low.h), _wide(low.b).T)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, d]: pairs are (i, i + d / 2). With -sin it is turned back."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rstd = x.square().mean(dim=-1, keepdim=True).add(eps).rsqrt()
    return x * rstd * weight, rstd


def _head_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rstd = x.square().mean(dim=-1, keepdim=True).add(eps).rsqrt()
    unit, slope = x * rstd, dy * weight
    return rstd * (slope - unit * (slope * unit).mean(dim=-1, keepdim=True))
