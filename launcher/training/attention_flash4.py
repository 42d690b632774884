"""flash-attn 4 (package flash-attn-4) as a Part, on Hopper and newer: kernels that are compiled when first used.

Its backward pass is called below its public function, which would not take the result and log-sum-exp of two calls.
"""

from __future__ import annotations

import fcntl
import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.errors import Problem, TrainingError
from launcher.training.attention_calls import Call
from launcher.training.attention_flash import TorchFlash
from launcher.training.attention_ways import Three

TAKES = ["q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal"]  # its backward pass, as far as it is known
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
BLOCKS = 512  # rows: for fewer it compiles kernels of one block, which the next micro-batch would not take
KEEP, KEPT_IN = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def unusable() -> str | None:
    """Why the installed package can't be used here, None where it can."""
    try:
        interface = _interface()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"its import fails: {error}"
    backward = getattr(interface, "_flash_attn_bwd", None)
    takes = [] if backward is None else list(inspect.signature(backward).parameters)
    known = takes[: len(TAKES)] == TAKES and set(BOUNDS) <= set(takes)
    return None if known else "its backward pass is not that of 4.0.0"


class FlashAttn4:
    """launcher.training.attention_ways.Part."""

    def __init__(self) -> None:
        self.interface, self.other = _interface(), TorchFlash()
        warnings.filterwarnings("ignore", message="Argument aux_data")  # its compiler of its own code

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Of Part; the log-sum-exp lies as [n, T]."""
        how = {"softmax_scale": scale, "causal": causal, "return_lse": True}
        with _told():
            out, lse = self.interface.flash_attn_varlen_func(q, k, v, **_bounds(call), **how)
        return out, lse.t()

    def backward(
        self, grad: Tensor, tensors: Three, out: Tensor, lse: Tensor, call: Call, scale: float, causal: bool
    ) -> Three:
        """Of Part."""
        if grad.shape[-1] % 32:  # towers that train: its gradients of such heads are wrong (4.0.0b36)
            return self.other.backward(grad, tensors, out, lse, call, scale, causal)
        how = {"softmax_scale": scale, "causal": causal}
        with _told():
            found = self.interface._flash_attn_bwd(*tensors, out, grad, lse.t().contiguous(), **how, **_bounds(call))
        return found[:3]  # type: ignore[no-any-return]


@contextmanager
def _told() -> Iterator[None]:
    """What its compiler stumbles over, with what to type; errors of the GPU are told elsewhere."""
    try:
        yield
    except Exception as error:
        if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
            raise
        text = f"flash-attn 4 cannot compute attention here: {type(error).__name__}: {str(error).strip()}"
        tries = ("attention=cudnn", "attention=varlen")
        raise TrainingError(Problem(text, tries=tries), title="with attention") from error


def _bounds(call: Call) -> dict[str, Any]:
    longest = (max(BLOCKS, call.max_q), max(BLOCKS, call.max_k))
    return dict(zip(BOUNDS, (call.cu_q, call.cu_k, *longest), strict=True))


def _interface() -> Any:
    """The package, its compiled kernels kept for the next run where the user's cache can be locked."""
    if KEEP not in os.environ and KEPT_IN not in os.environ:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "launcher" / "flash-attn-4"
        if _lockable(folder):
            os.environ |= {KEEP: "1", KEPT_IN: str(folder)}
    from flash_attn.cute import interface

    return interface


def _lockable(folder: Path) -> bool:
    """The package gives up a whole run where its files cannot be locked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, RuntimeError):
        return False
    return True
