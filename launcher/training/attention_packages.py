"""Kernels that take a document's keys gathered: its prefix and then its own, in one call causal to the lower right.

Shapes: T packed rows, K key rows of all segments, n heads, d head size; all take q [T, n, d], k and v [T, n_kv, d].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from launcher.training.attention_layout import Layout


def flash_attn_2(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None, causal: bool = True) -> Tensor:
    """The flash-attn package, version 2."""
    from flash_attn import flash_attn_varlen_func

    k, v = _gathered(k, v, layout)
    sizes = (layout.cu_q, layout.cu_k, layout.max_q, layout.max_k)
    return flash_attn_varlen_func(q, k, v, *sizes, softmax_scale=scale, causal=causal)


def flash_attn_3(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None, causal: bool = True) -> Tensor:
    """The flash-attn package, version 3 (Hopper)."""
    from flash_attn_interface import flash_attn_varlen_func

    k, v = _gathered(k, v, layout)
    sizes = (layout.cu_q, layout.cu_k, layout.max_q, layout.max_k)
    out = flash_attn_varlen_func(q, k, v, *sizes, softmax_scale=scale, causal=causal)
    return out[0] if isinstance(out, tuple) else out


class Gather(torch.autograd.Function):
    """Rows of a tensor, some more than once; their gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, rows: Tensor) -> Tensor:  # type: ignore[override]
        """`rows` [K] of `source`."""
        ctx.save_for_backward(rows)
        ctx.length = len(source)
        return source.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """Of `source`, as wide as it."""
        (rows,) = ctx.saved_tensors
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        total = wide.new_zeros((ctx.length, *grad.shape[1:])).index_add_(0, rows, wide)
        return total.to(grad.dtype), None


def _gathered(k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    if layout.key_rows is None:
        return k, v
    return Gather.apply(k, layout.key_rows), Gather.apply(v, layout.key_rows)  # type: ignore[no-untyped-call]
