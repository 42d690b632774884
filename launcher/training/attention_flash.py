"""PyTorch's own flash kernel as a Part: flash-attn 2, on Ampere and newer."""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.training.attention_calls import Call
from launcher.training.attention_ways import Three


class TorchFlash:
    """launcher.training.attention_ways.Part."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Of Part; the log-sum-exp lies as [n, T]."""
        sizes = (call.cu_q, call.cu_k, call.max_q, call.max_k)
        out = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, causal, False, scale=scale)
        return out[0], out[1].t()

    def backward(
        self, grad: Tensor, tensors: Three, out: Tensor, lse: Tensor, call: Call, scale: float, causal: bool
    ) -> Three:
        """Of Part."""
        sizes = (call.cu_q, call.cu_k, call.max_q, call.max_k)
        state = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of the dropout that there isn't
        unused = torch.empty(0, device=grad.device)
        back = torch.ops.aten._flash_attention_backward
        return back(grad, *tensors, out, lse.t().contiguous(), *sizes, 0.0, causal, state, unused, scale=scale)  # type: ignore[no-any-return]
