"""Packed attention with a shared prefix, through transformers' AttentionInterface.

A micro-batch is one row of packed segments. A segment's queries are its own rows; its keys are the rows of
its group's prefix (if any) and then its own, causal with both ends aligned: exactly what the document would
see in a prompt of its own. On GPUs this is one variable-length call over gathered keys, or, where prefixes are
long, two that are merged (attention_ways); on CPU segments are padded and masked, an exact reference. No attention
kernel here is ours.

Shapes: T packed rows, S segments, K key rows of all segments, n heads, d head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from launcher.attention_needs import AMPERE, HOPPER, PADDED, attention_problem, missing, missing_problem
from launcher.errors import ConfigError, Problem
from launcher.training import attention_cudnn, attention_flash4
from launcher.training import attention_packages as packages
from launcher.training.attention_layout import Layout, make_layout
from launcher.training.attention_ways import Part, attend

__all__ = ["KERNELS", "Layout", "choose_kernel", "install", "make_layout", "packed_attention", "padded_attention"]

# transformers gives a vision tower one call with cu_seqlens only to implementations named "flash";
# the text name must not contain it, or loading looks for the flash-attn package.
TEXT = "launcher_packed"
VISION = "launcher_packed_flash_vision"


def padded_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float | None
) -> torch.Tensor:
    """Exact masked attention over `layout.padded`; q [T, n, d], k and v [T, n_kv, d] -> [T, n, d]."""
    out = torch.zeros_like(q)
    for part in layout.padded:
        queries, keys, values = (
            t[rows].transpose(1, 2) for t, rows in ((q, part.query_rows), (k, part.key_rows), (v, part.key_rows))
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=part.mask, scale=scale, enable_gqa=True)
        out = out.index_put((part.query_rows[part.real],), mixed.transpose(1, 2)[part.real])
    return out


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    scale: float | None,
    causal: bool = True,
    *,
    make_part: Callable[[], Part],
) -> torch.Tensor:
    """A kernel's calls over segments, whichever way is less work; same shapes as `padded_attention`."""
    q, k, v = (t if t.stride()[1:] == (t.shape[2], 1) else t.contiguous() for t in (q, k, v))
    return attend(q, k, v, make_part(), layout, scale, causal)


@functools.cache
def torch_flash() -> Part:
    """PyTorch's own flash kernel over variable lengths."""
    from launcher.training.attention_flash import TorchFlash

    return TorchFlash()


@functools.cache
def cudnn_ragged() -> Part:
    """cuDNN's flash kernel over variable lengths; a process has one GPU, so one of these."""
    return attention_cudnn.CudnnRagged()


@functools.cache
def flash_attn_4() -> Part:
    """The flash-attn-4 package's kernel over variable lengths."""
    return attention_flash4.FlashAttn4()


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "cudnn": functools.partial(packed_attention, make_part=cudnn_ragged),
    "flash_attention_4": functools.partial(packed_attention, make_part=flash_attn_4),
    "flash_attention_3": packages.flash_attn_3,
    "flash_attention_2": packages.flash_attn_2,
    "varlen": functools.partial(packed_attention, make_part=torch_flash),
    "sdpa": padded_attention,
    "reference": padded_attention,
}


PACKAGES = {"cudnn": attention_cudnn, "flash_attention_4": attention_flash4}  # that tell whether they are unusable


def choose_kernel(asked: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The kernel to use and the reason, on the device that will run it.

    Raises ConfigError when the one asked for can't run here: never a silent substitute.
    """
    if asked != "auto":
        _refuse_unusable(asked, device, dtype)
    if device.type == "cpu":
        return "reference", "CPU: exact padded and masked attention"
    if asked in PADDED:
        return asked, "asked for; padded and masked, slower than a flash kernel"
    if asked != "auto":
        return asked, "asked for"
    if dtype == torch.float32:
        return "sdpa", "float32: flash kernels take 16-bit inputs only"
    return _fastest(torch.cuda.get_device_capability(device))


def _refuse_unusable(asked: str, device: torch.device, dtype: torch.dtype) -> None:
    """What the plan may have known, and what is known here alone."""
    problem = attention_problem(
        asked,
        device=device.type,
        precision="fp32" if dtype == torch.float32 else "bf16 or fp16",
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    if problem is None and (install := missing(asked)) is not None:
        problem = missing_problem(asked, install)
    if problem is None and asked in PACKAGES and (reason := PACKAGES[asked].unusable()) is not None:
        problem = Problem(f"attention={asked}: its package is installed, but {reason}", tries=("attention=auto",))
    if problem is not None:
        raise ConfigError(problem)


def _fastest(capability: tuple[int, int]) -> tuple[str, str]:
    """The kernel that tests/bench measured to be the fastest on GPUs of a compute capability."""
    if capability < AMPERE:
        return "sdpa", "flash kernels need Ampere or newer"
    if torch.are_deterministic_algorithms_enabled():
        return "varlen", "PyTorch's own flash kernel gives the same numbers every time: train.deterministic=true"
    if capability[0] != HOPPER[0]:
        return "varlen", "PyTorch's own flash kernel; no other is measured on this GPU"
    faults = {name: missing(name) or PACKAGES[name].unusable() for name in ("flash_attention_4", "cudnn")}
    if faults["flash_attention_4"] is None:
        return "flash_attention_4", "the fastest on Hopper"
    beside = "" if missing("flash_attention_4") else f"; of flash-attn-4 {faults['flash_attention_4']}"
    if faults["cudnn"] is None:
        return "cudnn", f"the fastest on Hopper but for flash-attn-4's{beside}"
    if missing("cudnn") is not None:
        return "varlen", f"PyTorch's own flash kernel; pip install nvidia-cudnn-frontend brings a faster one{beside}"
    return "varlen", f"PyTorch's own flash kernel; of cuDNN's {faults['cudnn']}{beside}"


def install(language: Any, tower: Any | None, kernel: str, *, layout_padded: bool, packed: bool = True) -> None:
    """Make the attention of a language model and a vision tower use `kernel`; importing this module changes nothing.

    A language model that is not `packed` keeps transformers' own, over rows with an attention mask.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    function = KERNELS[kernel]
    AttentionInterface.register(TEXT, _text_attention(function))
    AttentionInterface.register(VISION, _vision_attention(function, padded=layout_padded))
    for name in (TEXT, VISION):
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    language.config._attn_implementation_internal = TEXT if packed else "sdpa"
    if tower is not None:
        tower.config._attn_implementation_internal = VISION


def _text_attention(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, *, scaling: float, packed: Layout, **_: Any) -> Any:
        rows = (t[0].transpose(0, 1) for t in (q, k, v))  # [1, n, T, d] -> [T, n, d]
        return function(*rows, packed, scaling)[None], None

    return attend


def _vision_attention(function: Callable[..., torch.Tensor], *, padded: bool) -> Callable[..., Any]:
    def attend(module: Any, q: Any, k: Any, v: Any, *, scaling: float, cu_seq_lens_q: Any, **kwargs: Any) -> Any:
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        if padded:
            return _whole_images(q, k, v, cu_seq_lens_q, scaling)[None], None
        longest = int(kwargs["max_length_q"])
        layout = Layout(cu_seq_lens_q, cu_seq_lens_q, None, longest, longest)
        return function(q, k, v, layout, scaling, causal=False)[None], None

    return attend


def _whole_images(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Full attention inside each image, images of equal size together; shapes as in `padded_attention`."""
    bounds = cu_seqlens.tolist()
    sizes: dict[int, list[int]] = {}
    for begin, end in zip(bounds, bounds[1:], strict=False):
        sizes.setdefault(end - begin, []).append(begin)
    out = torch.zeros_like(q)
    for size, begins in sizes.items():
        rows = torch.tensor(begins, device=q.device)[:, None] + torch.arange(size, device=q.device)
        queries, keys, values = (t[rows].transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        out = out.index_put((rows,), mixed.transpose(1, 2))
    return out
