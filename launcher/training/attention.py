"""Packed attention with a shared prefix, through transformers' AttentionInterface.

A micro-batch is one row of packed segments. A segment's queries are its own rows; its keys are the rows of
its group's prefix (if any) and then its own, causal with both ends aligned: exactly what the document would
see in a prompt of its own. On GPUs this is one variable-length flash call with cu_seqlens_q != cu_seqlens_k;
on CPU segments are padded and masked, an exact reference. No kernel here is ours.

Shapes: T packed rows, S segments, K key rows of all segments, n heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

# transformers gives a vision tower one call with cu_seqlens only to implementations named "flash";
# the text name must not contain it, or loading looks for the flash-attn package.
TEXT = "launcher_packed"
VISION = "launcher_packed_flash_vision"


@dataclass(frozen=True, slots=True)
class Padded:
    """Segments of like shape, padded to Q queries and K keys."""

    query_rows: torch.Tensor  # [S, Q]
    key_rows: torch.Tensor  # [S, K]
    mask: torch.Tensor  # [S, 1, Q, K] true = may attend
    real: torch.Tensor  # [S, Q] false = padding

    def to(self, device: torch.device, non_blocking: bool = False) -> Padded:
        """The same on a device."""
        return Padded(*(getattr(self, name).to(device) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rows attend to which, for both kinds of kernel."""

    cu_q: torch.Tensor  # [S + 1] int32
    cu_k: torch.Tensor  # [S + 1] int32
    key_rows: torch.Tensor | None  # [K] rows to gather as keys; None: no segment has a prefix
    max_q: int
    max_k: int
    padded: tuple[Padded, ...] = ()  # CPU only

    def to(self, device: torch.device, non_blocking: bool = False) -> Layout:
        """The same on a device."""
        rows = None if self.key_rows is None else self.key_rows.to(device, non_blocking=non_blocking)
        return replace(
            self,
            cu_q=self.cu_q.to(device, non_blocking=non_blocking),
            cu_k=self.cu_k.to(device, non_blocking=non_blocking),
            key_rows=rows,
            padded=tuple(p.to(device) for p in self.padded),
        )


Rows = tuple[int, int]  # begin, end


def make_layout(queries: Sequence[Rows], prefixes: Sequence[Rows], *, padded: bool) -> Layout:
    """Layout of segments given each one's own rows and its prefix's rows (empty when begin == end)."""
    own = np.array([end - begin for begin, end in queries])
    before = np.array([end - begin for begin, end in prefixes])
    keys = [np.r_[p[0] : p[1], q[0] : q[1]] for q, p in zip(queries, prefixes, strict=True)]
    return Layout(
        cu_q=torch.from_numpy(np.concatenate([[0], np.cumsum(own)]).astype(np.int32)),
        cu_k=torch.from_numpy(np.concatenate([[0], np.cumsum(own + before)]).astype(np.int32)),
        key_rows=torch.from_numpy(np.concatenate(keys)) if before.any() else None,
        max_q=int(own.max()),
        max_k=int((own + before).max()),
        padded=_pad(queries, prefixes, keys) if padded else (),
    )


def _pad(queries: Sequence[Rows], prefixes: Sequence[Rows], keys: Sequence[np.ndarray]) -> tuple[Padded, ...]:
    """Segments with and without a prefix apart: their shapes differ most."""
    kinds: dict[bool, list[int]] = {}
    for index, (begin, end) in enumerate(prefixes):
        kinds.setdefault(begin < end, []).append(index)
    out = []
    for members in kinds.values():
        length_q = max(queries[i][1] - queries[i][0] for i in members)
        length_k = max(len(keys[i]) for i in members)
        query_rows = np.zeros((len(members), length_q), np.int64)
        key_rows = np.zeros((len(members), length_k), np.int64)
        mask = np.zeros((len(members), length_q, length_k), bool)
        real = np.zeros((len(members), length_q), bool)
        for row, i in enumerate(members):
            own = queries[i][1] - queries[i][0]
            query_rows[row, :own] = np.arange(*queries[i])
            key_rows[row, : len(keys[i])] = keys[i]
            before = len(keys[i]) - own
            mask[row, :own, : len(keys[i])] = np.tri(own, len(keys[i]), before, dtype=bool)
            mask[row, own:, 0] = True  # a padding query must attend to something; its output is dropped
            real[row, :own] = True
        tensors = (torch.from_numpy(a) for a in (query_rows, key_rows, mask[:, None], real))
        out.append(Padded(*tensors))
    return tuple(out)


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


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float | None, causal: bool = True
) -> torch.Tensor:
    """PyTorch's own flash kernel over variable lengths; same shapes as `padded_attention`."""
    k, v = _gathered(k, v, layout)
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, layout.cu_q, layout.cu_k, layout.max_q, layout.max_k, 0.0, causal, False, scale=scale
    )
    return out[0]


def flash_attn_2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float | None, causal: bool = True
) -> torch.Tensor:
    """The flash-attn package, version 2."""
    from flash_attn import flash_attn_varlen_func

    k, v = _gathered(k, v, layout)
    sizes = (layout.cu_q, layout.cu_k, layout.max_q, layout.max_k)
    return flash_attn_varlen_func(q, k, v, *sizes, softmax_scale=scale, causal=causal)


def flash_attn_3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float | None, causal: bool = True
) -> torch.Tensor:
    """The flash-attn package, version 3 (Hopper)."""
    from flash_attn_interface import flash_attn_varlen_func

    k, v = _gathered(k, v, layout)
    sizes = (layout.cu_q, layout.cu_k, layout.max_q, layout.max_k)
    out = flash_attn_varlen_func(q, k, v, *sizes, softmax_scale=scale, causal=causal)
    return out[0] if isinstance(out, tuple) else out


def _gathered(k: torch.Tensor, v: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    if layout.key_rows is None:
        return k, v
    return k.index_select(0, layout.key_rows), v.index_select(0, layout.key_rows)


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "flash_attention_3": flash_attn_3,
    "flash_attention_2": flash_attn_2,
    "varlen": varlen_attention,
    "sdpa": padded_attention,
    "reference": padded_attention,
}


def choose_kernel(asked: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The kernel to use and the reason, on the device that will run it.

    Raises ImportError or ValueError when the one asked for can't run here: never a silent substitute.
    """
    import importlib.util

    if device.type == "cpu":
        if asked not in ("auto", "sdpa", "reference"):
            raise ValueError(f"attention={asked} needs a GPU; on CPU use attention=auto")
        return "reference", "CPU: exact padded and masked attention"
    if asked in ("sdpa", "reference"):
        return asked, "asked for; padded and masked, slower than a flash kernel"
    if dtype == torch.float32:
        if asked != "auto":
            raise ValueError(f"attention={asked} has no float32 kernel; use attention=sdpa or precision=bf16")
        return "sdpa", "float32: flash kernels take 16-bit inputs only"
    packages = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
    if asked in packages and importlib.util.find_spec(packages[asked]) is None:
        raise ImportError(f"attention={asked} needs the package {packages[asked]}, which isn't installed")
    if asked != "auto":
        return asked, "asked for"
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    if hopper and importlib.util.find_spec("flash_attn_interface") is not None:
        return "flash_attention_3", "installed, and the GPU is Hopper or newer"
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash_attention_2", "installed"
    return "varlen", "PyTorch's own flash kernel; flash-attn isn't installed"


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
