"""Attention to a shared prefix by kernels that know only variable-length calls: two ways, with their gradients.

Gathered: every document's keys are its prefix's, copied, and its own; one call, causal to the lower right. The copies
are made again in the backward pass rather than kept, and a row's gradients are added up in float32.

Cascade: two calls without copies, merged. Softmax over the keys of both is the mean of the two results, weighted by
exp(log-sum-exp). In the backward pass each call takes the merged result and log-sum-exp, from which it computes the
weights that its keys have among all: its gradients are exact, those of documents' queries and of prefix rows the sums
of both calls'. What documents give a prefix row's gradient is added up inside the kernel.

A second call costs time for every row, a copy for every key: cascade is for long prefixes (launcher.arithmetic).

Shapes: T packed rows, K gathered key rows, n heads, n_kv key heads, d head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from launcher.arithmetic import gathers_keys
from launcher.training import attention_rows as op
from launcher.training.attention_calls import Call, Shared
from launcher.training.attention_layout import Layout

Three = tuple[Tensor, Tensor, Tensor]
Scale = tuple[float, bool]  # of the scores, and whether the call is causal, to the lower right


class Part(Protocol):
    """A kernel for one call; q [T, n, d], k and v [T, n_kv, d], heads side by side in a row."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """(result [T, n, d], contiguous; log-sum-exp of the scores [T, n] float32, in strides of its choice)."""
        ...

    def backward(
        self, grad: Tensor, tensors: Three, out: Tensor, lse: Tensor, call: Call, scale: float, causal: bool
    ) -> Three:
        """Gradients of q, k and v, `tensors`, contiguous; result and log-sum-exp may be of more keys than these."""
        ...


def attend(
    q: Tensor, k: Tensor, v: Tensor, part: Part, layout: Layout, scale: float | None, causal: bool = True
) -> Tensor:
    """[T, n, d]: every segment attends to its prefix, if any, and to itself."""
    how = (q.shape[-1] ** -0.5 if scale is None else scale, causal)
    if layout.shared is not None and not gathers_keys(len(q), len(layout.key_rows)):  # type: ignore[arg-type]
        return _Cascade.apply(q, k, v, part, layout.own, layout.shared, how)
    return _Gathered.apply(q, k, v, part, layout.whole, layout.key_rows, how)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, part: Part, call: Call, rows: Tensor | None, how: Scale
    ) -> Tensor:
        out, lse = part.forward(q, *_gathered(k, v, rows), call, *how)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.part, ctx.call, ctx.rows, ctx.how = part, call, rows, how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        tensors = (q, *_gathered(k, v, ctx.rows))
        dq, dk, dv = ctx.part.backward(grad.contiguous(), tensors, out, lse, ctx.call, *ctx.how)
        if ctx.rows is not None:
            del tensors
            dk, dv = op.sum_rows(dk, dv, len(k), ctx.rows, ctx.call.derived)
        return dq, dk, dv, None, None, None, None


def _gathered(k: Tensor, v: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    return (k, v) if rows is None else (k.index_select(0, rows), v.index_select(0, rows))


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, part: Part, own: Call, shared: Shared, how: Scale
    ) -> Tensor:
        out, lse = part.forward(q, k, v, own, *how)
        rows, keys = slice(*shared.queries), slice(*shared.keys)
        other, other_lse = part.forward(q[rows], k[keys], v[keys], shared.call, how[0], False)
        op.merge_(out[rows], lse[rows], other, other_lse, shared.documents)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.part, ctx.own, ctx.shared, ctx.how = part, own, shared, how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        grad, shared = grad.contiguous(), ctx.shared
        gradients = ctx.part.backward(grad, (q, k, v), out, lse, ctx.own, *ctx.how)
        rows, keys = slice(*shared.queries), slice(*shared.keys)
        tensors = (q[rows], k[keys], v[keys])
        others = ctx.part.backward(grad[rows], tensors, out[rows], lse[rows], shared.call, ctx.how[0], False)
        for total, other, part, chosen in zip(
            *(gradients, others, (rows, keys, keys), (shared.documents, shared.prefixes, shared.prefixes)), strict=True
        ):
            op.add_(total[part], other, chosen)
        return *gradients, None, None, None, None
