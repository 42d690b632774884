"""The operations of launcher.training.fused.ops on a GPU, in Triton."""

from __future__ import annotations

from launcher.training.fused.kernels_add import add
from launcher.training.fused.kernels_norm import add_norm, norm_backward, rms_norm
from launcher.training.fused.kernels_rotate import rotate, rotate_backward
from launcher.training.fused.kernels_swiglu import swiglu, swiglu_backward
from launcher.training.fused.kernels_weights import head_norm_weight_gradient, norm_weight_gradient

__all__ = [
    "add",
    "add_norm",
    "head_norm_weight_gradient",
    "norm_backward",
    "norm_weight_gradient",
    "rms_norm",
    "rotate",
    "rotate_backward",
    "swiglu",
    "swiglu_backward",
]
