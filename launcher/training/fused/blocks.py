"""The two halves of a decoder layer around its attention, each with a backward pass written by hand.

Kept for the backward pass, beside what attention keeps: the layer's input, the raw queries, keys and values, the
residual in the middle, gate and up. Normed inputs, SwiGLU's result and adapters' products come again from these in
passes that are made anyway; autograd would keep three times as much and walk over it as often.

Shapes as in launcher.training.fused.ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.training.fused import ops
from launcher.training.fused.ops import Low
from launcher.training.fused.projections import Joined


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The parts of a decoder layer, as `launcher.training.fused.layer.parts_of` finds them."""

    before: Any  # RMSNorm before attention
    qkv: Joined
    norms: tuple[Any, Any] | None  # RMSNorms by head, of queries and keys
    out: Joined
    after: Any  # RMSNorm before the MLP
    gate_up: Joined
    down: Joined
    heads: tuple[int, int]  # of queries, of keys

    def head_norms(self) -> tuple[Tensor, Tensor, float] | None:
        """Weights of the norms by head and their eps."""
        if self.norms is None:
            return None
        return self.norms[0].weight, self.norms[1].weight, self.norms[0].variance_epsilon

    def first(self) -> list[Any]:
        """Parameters of the half before attention that train, None in place of others."""
        of_norms = [n.weight for n in (self.before, *(self.norms or ()))]
        return [*(w if w.requires_grad else None for w in of_norms), *self.qkv.parameters()]

    def second(self) -> list[Any]:
        """Parameters of the half after attention that train, None in place of others."""
        norm = self.after.weight if self.after.weight.requires_grad else None
        return [norm, *self.out.parameters(), *self.gate_up.parameters(), *self.down.parameters()]


def before_attention(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries [T, n, d], keys [T, m, d], values [T, m, d], x [T, H] again for the residual)."""
    return _Before.apply(layer, x, cos, sin, *layer.first())  # type: ignore[no-any-return, no-untyped-call]


def after_attention(layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    """The layer's result [T, H], from its input x and what attention gave, [T, n d]."""
    return _After.apply(layer, x, attended, *layer.second())  # type: ignore[no-any-return, no-untyped-call]


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        norm = layer.before
        normed, rstd = ops.rms_norm(x, norm.weight, norm.variance_epsilon, spare=layer.qkv.spare)
        qkv, low, h = layer.qkv.forward(normed)
        q, k, v = ops.rotate(qkv, low, layer.head_norms(), cos, sin, layer.heads)
        ctx.layer = layer
        ctx.save_for_backward(x, rstd, qkv, h, cos, sin)
        return q, k, v, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (dq, dk, dv, residual), layer = slopes, ctx.layer
        x, rstd, qkv, h, cos, sin = ctx.saved_tensors
        low = layer.qkv.low(h)
        dqkv = ops.rotate_backward(dq, dk, dv, qkv, low, layer.head_norms(), cos, sin, spare=layer.qkv.spare)
        of_heads = _head_norm_gradients(layer, dq, dk, qkv, low, cos, sin)
        wanted = residual if ctx.needs_input_grad[1] else None
        # What comes before is most often another layer, whose last product takes its adapters along.
        spare = layer.down.spare
        dx, of_norm, *rest = _through_norm(layer.qkv, layer.before, dqkv, h, (x, rstd), wanted, spare=spare)
        return None, dx, None, None, of_norm, *of_heads, *rest


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, attended: Tensor, *parameters: Any) -> Tensor:
        norm = layer.after
        delta, low, h_out = layer.out.forward(attended)
        middle, normed, rstd = ops.add_norm(
            x, delta, low, norm.weight, norm.variance_epsilon, spare=layer.gate_up.spare
        )
        del delta  # as large as the input; what follows is the fullest moment
        gate_up, low, h = layer.gate_up.forward(normed)
        del normed
        act = ops.swiglu(gate_up, low, spare=layer.down.spare)
        delta, low, h_down = layer.down.forward(act)
        ctx.layer = layer
        ctx.save_for_backward(attended, middle, rstd, gate_up, h_out, h, h_down)
        return ops.add(middle, delta, low)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: Layer = ctx.layer
        attended, middle, rstd, gate_up, h_out, h, h_down = ctx.saved_tensors
        g = _thin(layer.down, dy)
        dact = layer.down.backward_input(dy, g)
        act, dgate_up = ops.swiglu_backward(dact, gate_up, layer.gate_up.low(h))
        of_down = _gradients(layer.down, dy, h_down, g, act)
        del act, dact
        dmiddle, of_norm, *of_gate_up = _through_norm(
            layer.gate_up, layer.after, dgate_up, h, (middle, rstd), dy, spare=layer.out.spare
        )
        del dgate_up, gate_up
        g = _thin(layer.out, dmiddle)
        dattended = layer.out.backward_input(dmiddle, g)
        of_out = _gradients(layer.out, dmiddle, h_out, g, attended)
        return None, dmiddle, dattended, of_norm, *of_out, *of_gate_up, *of_down


def _thin(joined: Joined, dy: Tensor) -> Tensor | None:
    """dy B [T, R], None without adapters."""
    return torch.mm(dy, joined.b()) if joined.rank else None


def _gradients(joined: Joined, dy: Tensor, h: Tensor | None, g: Tensor | None, x: Tensor) -> list[Tensor | None]:
    """Of all parameters of projections with input x [T, K]."""
    da = None if g is None else torch.mm(g.T, x)
    return joined.gradients(dy, h, da, x if joined.trains_weights else None)


def _through_norm(
    joined: Joined,
    norm: Any,
    dy: Tensor,
    h: Tensor | None,
    normalised: tuple[Tensor, Tensor],
    residual: Tensor | None,
    *,
    spare: int = 0,
) -> list[Any]:
    """Gradients of x, of the norm's weight and of the projections of RMSNorm(x), from dy [T, D] of their result.

    `normalised` is x [T, H] and 1 / rms(x) [T]. `residual` is what else the gradient of x is made of; None: nobody
    wants that, as of embeddings that do not train.
    """
    (x, rstd), weight, g = normalised, norm.weight, _thin(joined, dy)
    normed = da = None
    if joined.trains_weights or x.dtype == torch.float16:  # in float16 a slope divided by rms(x) may vanish
        normed, _ = ops.rms_norm(x, weight, norm.variance_epsilon)
    if g is not None and normed is not None:
        da = torch.mm(g.T, normed)
    elif g is not None:
        # RMSNorm(x) is not written out for it: its factors go to the thin side of the product and to its result.
        da = torch.mm((g * rstd[:, None]).to(g.dtype).T, x) * weight
    found = joined.gradients(dy, h, da, normed)
    if residual is None and not weight.requires_grad:
        return [None, None, *found]
    back = joined.backward_input(dy, g)
    of_norm = ops.norm_weight_gradient(back, x, rstd).to(weight.dtype) if weight.requires_grad else None
    return [ops.norm_backward(back, x, rstd, weight, residual, spare=spare), of_norm, *found]


def _head_norm_gradients(
    layer: Layer, dq: Tensor, dk: Tensor, qkv: Tensor, low: Low | None, cos: Tensor, sin: Tensor
) -> list[Tensor | None]:
    """Of the weights of the norms by head, one for each of them that the family has."""
    found: list[Tensor | None] = []
    begin = 0
    for norm, slope in zip(layer.norms or (), (dq, dk), strict=False):
        columns = slice(begin, begin + slope[0].numel())
        begin = columns.stop
        if not norm.weight.requires_grad:
            found.append(None)
            continue
        raw = qkv[:, columns] if low is None else torch.addmm(qkv[:, columns], low.h, low.b[columns].T)
        gradient = ops.head_norm_weight_gradient(slope, raw.view(slope.shape), cos, sin, norm.variance_epsilon)
        found.append(gradient.to(norm.weight.dtype))
    return found
