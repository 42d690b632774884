"""A packed micro-batch -> the language model's last hidden states, images and videos in place.

The forward is composed here rather than left to transformers' own, so that every rank makes exactly one call
of the vision tower a micro-step, whatever its rows hold, in the same order (collectives of ZeRO must match).

Shapes: T packed tokens, R rows asked for, H hidden size, V visual tokens, P patches.
"""

from __future__ import annotations

from typing import Any

import torch

from launcher.training.batching import MicroBatch
from launcher.training.fused import layer
from launcher.training.vision_sight import Sight


def core_of(model: Any) -> Any:
    """transformers' model without its head, bare or inside peft's wrapper."""
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    return bare.model


def language_of(core: Any) -> Any:
    """The language model of a core: of a family that reads text only, the core itself."""
    return getattr(core, "language_model", core)


def tower_of(core: Any) -> Any:
    """The vision tower of a core, None without."""
    return getattr(core, "visual", None)


def hidden_states(
    core: Any, batch: MicroBatch, *, always_see: bool, rows: torch.Tensor, sight: Sight | None
) -> torch.Tensor:
    """Last hidden states [R, H] of the tokens `rows` [R], which may be none.

    `always_see` runs the vision tower without an image too, which adds exactly 0; `sight` is that of a model with one.
    """
    language = language_of(core)
    features = None if sight is None else sight.see(batch, always=always_see)
    embeds = language.embed_tokens(batch.input_ids)  # [T, H]
    deep: list[torch.Tensor] | None = None
    if features is not None:
        merged, deep = features
        if batch.visual_rows is None:
            # No image here, yet the tower ran for the other ranks' sake: it adds exactly nothing.
            embeds = embeds + 0.0 * torch.stack([f.sum() for f in [merged, *deep]]).sum().to(embeds.dtype)
            deep = None
        else:
            embeds = embeds.index_put((batch.visual_rows,), merged[batch.visual_source].to(embeds.dtype))
            deep = [f[batch.visual_source] for f in deep]
    # Without a tower there is one kind of position: the three rows are equal.
    positions = batch.position_ids[:, None] if tower_of(core) is not None else batch.position_ids[:1]
    if is_recurrent(language):
        return _unpacked(language, embeds, positions, batch).index_select(0, rows)
    if hasattr(language.layers[0], "fused"):
        seen = layer.Seen(batch.visual_rows, deep) if deep and batch.visual_rows is not None else None
        return layer.run_layers(language, embeds, positions, batch.layout, rows, seen)
    deepstack: dict[str, Any] = {}
    if deep:
        mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
        mask[0, batch.visual_rows] = True
        deepstack = {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
    hidden = language(
        inputs_embeds=embeds[None],
        position_ids=positions,
        attention_mask=None,
        use_cache=False,
        packed=batch.layout,
        **deepstack,
    ).last_hidden_state[0]
    # Not hidden[rows], whose gradient sorts the rows so that it may add in a fixed order: these are all different.
    return hidden.index_select(0, rows)


def is_recurrent(language: Any) -> bool:
    """Whether some layers carry a state along the sequence (Qwen3.5's gated delta nets)."""
    return "linear_attention" in (getattr(language.config, "layer_types", None) or ())


def _unpacked(language: Any, embeds: torch.Tensor, positions: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Last hidden states [T, H] of a model whose layers would carry a state from one document into the next.

    Every document is a row of its own, padded at its end, where nothing follows that it could change. One call,
    as on every other rank. Needs a layout of padded segments in which no document has a prefix.
    """
    (part,) = batch.layout.padded
    hidden = language(
        inputs_embeds=embeds[part.query_rows],
        position_ids=positions[:, 0][:, part.query_rows],
        attention_mask=part.real.long(),
        use_cache=False,
    ).last_hidden_state  # [S, Q, H]
    return torch.zeros_like(embeds).index_put((part.query_rows[part.real],), hidden[part.real])
