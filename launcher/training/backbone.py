"""A packed micro-batch -> the language model's last hidden states, images and videos in place.

The forward is composed here rather than left to transformers' own, so that every rank makes exactly one call
of the vision tower a micro-step, whatever its rows hold, in the same order (collectives of ZeRO must match).

Shapes: T packed tokens, H hidden size, V visual tokens, P patches.
"""

from __future__ import annotations

from typing import Any

import torch

from launcher.training.batching import MicroBatch


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


def hidden_states(core: Any, batch: MicroBatch, *, always_see: bool) -> torch.Tensor:
    """Last hidden states [T, H]; `always_see` runs the vision tower without an image too, which adds exactly 0."""
    language = language_of(core)
    features = _see(core, batch, always_see)
    embeds = language.embed_tokens(batch.input_ids)  # [T, H]
    deep: list[torch.Tensor] | None = None
    mask = None
    if features is not None:
        merged, deep = features
        if batch.visual_rows is None:
            # No image here, yet the tower ran for the other ranks' sake: it adds exactly nothing.
            embeds = embeds + 0.0 * torch.stack([f.sum() for f in [merged, *deep]]).sum().to(embeds.dtype)
            deep = None
        else:
            embeds = embeds.index_put((batch.visual_rows,), merged[batch.visual_source].to(embeds.dtype))
            deep = [f[batch.visual_source] for f in deep]
            mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
            mask[0, batch.visual_rows] = True
    # Without a tower there is one kind of position: the three rows are equal.
    positions = batch.position_ids[:, None] if tower_of(core) is not None else batch.position_ids[:1]
    if is_recurrent(language):
        return _unpacked(language, embeds, positions, batch)
    deepstack = {"visual_pos_masks": mask, "deepstack_visual_embeds": deep} if deep else {}
    return language(
        inputs_embeds=embeds[None],
        position_ids=positions,
        attention_mask=None,
        use_cache=False,
        packed=batch.layout,
        **deepstack,
    ).last_hidden_state[0]


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


def _see(core: Any, batch: MicroBatch, always_see: bool) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """The tower's merged features and its deepstack features (if any), each [V', H]; None where it needn't run."""
    if tower_of(core) is None:
        return None
    pixels, grid = batch.pixel_values, batch.grid_thw
    weight = core.visual.patch_embed.proj.weight
    if pixels is None or grid is None:
        if not always_see:
            return None
        merge, config = core.visual.spatial_merge_size, core.visual.config
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.zeros(merge * merge, width, device=weight.device)
        grid = torch.tensor([[1, merge, merge]], device=weight.device)
    out = core.visual(pixels.to(weight.dtype), grid_thw=grid)
    return out.pooler_output, list(getattr(out, "deepstack_features", None) or ())
