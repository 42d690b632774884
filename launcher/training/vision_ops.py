"""What lies between the matrix products of a vision block, each in one pass over memory; no gradients.

On a GPU these are Triton kernels (launcher.training.vision_kernels); on CPU plain torch, which is also what the
kernels are tested against. They compute in float32 and round where transformers rounds.

Shapes: P patches, H width of the tower, F inner width of its MLP, n heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def turn_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn queries and keys in place: qkv [P, 3, n, d], contiguous; cos and sin [P, d / 2] float32, alike for all
    heads, of the first and of the second half of a head."""
    if not qkv.is_cpu:
        return _kernels().turn_(qkv, cos, sin)
    first, second = qkv[:, :2].float().chunk(2, dim=-1)
    c, s = cos[:, None, None], sin[:, None, None]
    qkv[:, :2] = torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(qkv.dtype)


def add_norm_(x: Tensor, delta: Tensor | None, norm: Any) -> Tensor:
    """Add `delta` to x [P, H] in place and give the norm of the sum: `norm` is torch's LayerNorm, or an RMSNorm with
    `weight` and `variance_epsilon`."""
    rms = not isinstance(norm, nn.LayerNorm)
    eps = norm.variance_epsilon if rms else norm.eps
    weight, bias = norm.weight, None if rms else norm.bias
    if not x.is_cpu:
        return _kernels().add_norm_(x, delta, weight, bias, eps)
    if delta is not None:
        x += delta
    if not rms:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = x.float()
    return weight * (wide * wide.square().mean(dim=-1, keepdim=True).add(eps).rsqrt()).to(x.dtype)


def gelu_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    """GELU in its tanh form of a linear layer, [P, F]; on a GPU at the end of the product itself."""
    if x.is_cuda:
        # cuBLASLt's own GELU is the tanh form; on CPU the same call takes the other one.
        return torch.ops.aten._addmm_activation(linear.bias, x, linear.weight.t(), use_gelu=True)
    return F.gelu(F.linear(x, linear.weight, linear.bias), approximate="tanh")


def silu_times_(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up [P, F], in the place of `gate`."""
    if not gate.is_cpu:
        return _kernels().silu_times_(gate, up)
    return F.silu(gate, inplace=True).mul_(up)


def _kernels():  # type: ignore[no-untyped-def]
    """Triton takes a while to import, and a machine without a GPU needs none of it."""
    from launcher.training import vision_kernels

    return vision_kernels
