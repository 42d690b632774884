"""Decoder layers computed by the fused functions instead of transformers' forward."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from launcher.training.attention import KERNELS
from launcher.training.fused import blocks
from launcher.training.fused.projections import Joined, projection_of, refresh


def install(language: Any, kernel: str) -> None:
    """Have every decoder layer of a language model computed by the fused functions, with the attention `kernel`.

    After adapters were added.
    """
    for layer in language.layers:
        layer.fused = _Fused(parts_of(layer), kernel, float(layer.self_attn.scaling))
        layer.forward = MethodType(_forward, layer)
    language.layers[-1].fused.is_last = True


def lay_together(language: Any) -> None:
    """Give frozen weights of fused layers a place with their adapters (`projections`), to be found there from now on.

    After DeepSpeed has started, and not under ZeRO-3: a weight must lie in one piece before and stay there afterwards.
    """
    for joined in _joined_of(language):
        joined.lay_together()


def _joined_of(language: Any) -> list[Joined]:
    parts = [layer.fused.parts for layer in language.layers]
    return [joined for p in parts for joined in (p.qkv, p.out, p.gate_up, p.down)]


def parts_of(layer: Any) -> blocks.Layer:
    """What the fused functions need of a decoder layer; raises ValueError for a linear layer of an unknown kind."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
    config = attention.config
    return blocks.Layer(
        before=layer.input_layernorm,
        qkv=_joined(attention, "q_proj", "k_proj", "v_proj"),
        norms=norms,
        out=_joined(attention, "o_proj"),
        after=layer.post_attention_layernorm,
        gate_up=_joined(mlp, "gate_proj", "up_proj"),
        down=_joined(mlp, "down_proj"),
        heads=(config.num_attention_heads, config.num_key_value_heads),
    )


def _joined(parent: Any, *names: str) -> Joined:
    found = [projection_of(getattr(parent, name)) for name in names]
    if any(projection is None for projection in found):
        kinds = ", ".join(type(getattr(parent, name)).__name__ for name in names)
        raise ValueError(f"train.kernels=fused: {', '.join(names)} are {kinds}, which it cannot compute")
    return Joined(*[projection for projection in found if projection is not None])


class Seen(NamedTuple):
    """What the vision tower adds to the results of the first layers (deepstack)."""

    rows: Tensor  # [V] of the packed sequence
    features: list[Tensor]  # [V, H] of each layer


class _Fused:
    """How one layer is computed; no module, so that it adds no parameter a second time."""

    def __init__(self, parts: blocks.Layer, kernel: str, scale: float) -> None:
        self.parts, self.attend, self.scale = parts, KERNELS[kernel], scale
        self.recompute = self.is_last = False

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Any, rows: Tensor | None) -> Tensor:
        q, k, v, x = blocks.before_attention(self.parts, x, cos, sin)
        attended = self.attend(q, k, v, packed, self.scale).flatten(1)
        if self.is_last and rows is not None:  # nothing looks at what the others would become
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        return blocks.after_attention(self.parts, x, attended)


def _forward(self: Any, x: Tensor, cos: Tensor, sin: Tensor, packed: Any, rows: Tensor | None) -> Tensor:
    """A decoder layer's forward: x [T, H] in and out, of the last layer `rows` alone."""
    run = self.fused
    if run.recompute and self.training and torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False)
    return run(x, cos, sin, packed, rows)  # type: ignore[no-any-return]


def run_layers(language: Any, x: Tensor, positions: Tensor, packed: Any, rows: Tensor, seen: Seen | None) -> Tensor:
    """Last hidden states [R, H] of `rows`, from embeddings x [T, H]; `positions` as transformers' rotary takes them.

    Layers are called as modules: ZeRO-3 gathers weights where one is called.
    """
    refresh(_joined_of(language))
    cos, sin = (t[0] for t in language.rotary_emb(x[None], positions))
    deep = seen.features if seen is not None else []
    early = len(deep) < len(language.layers)  # nothing is added after the last layer
    for number, layer in enumerate(language.layers):
        x = layer(x, cos, sin, packed, rows if early else None)
        if seen is not None and number < len(deep):
            x = x.index_add(0, seen.rows, deep[number].to(x.dtype))
    return language.norm(x if early else x.index_select(0, rows))  # type: ignore[no-any-return]
