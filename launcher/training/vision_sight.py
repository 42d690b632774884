"""The vision tower in training: which way its features are computed, and which of them are kept.

Every rank runs the tower once in a micro-step where one must (ZeRO-3's collectives), whatever its rows hold and
whatever its cache has.

Shapes: V visual tokens of a micro-batch, P patches, K maps of features, C width of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher.attention_needs import PADDED
from launcher.errors import ConfigError, Problem
from launcher.families import Family
from launcher.training import attention
from launcher.training.batching import MicroBatch
from launcher.training.media import Grid
from launcher.training.patches import Patches
from launcher.training.pieces import MediaKey
from launcher.training.vision_cache import FeatureCache
from launcher.training.vision_tower import Attend, Features, FrozenTower, install, why_plain


class Sight:
    """Sees the images of micro-batches."""

    def __init__(
        self,
        tower: Any,
        family: Family,
        attend: Attend,
        cache: FeatureCache | None = None,
        *,
        shards: str | None = None,
    ) -> None:
        """`shards`: see why_plain. Raises ConfigError for a cache of features that training would change."""
        self.tower, self.cache = tower, cache
        if cache is not None and _trains(tower):
            text = "memory.vision_cache_gib keeps features that this run changes: the vision tower or projector trains"
            tries = ("memory.vision_cache_gib=0", "tune.vision=frozen tune.projector=frozen")
            raise ConfigError(Problem(text, tries=tries))
        self._compute: Any = _way(tower, family, attend, shards)

    def knows(self, key: MediaKey) -> bool:
        """Whether an image's features are kept: its pixels are not needed any more."""
        return self.cache is not None and key in self.cache

    def see(self, batch: MicroBatch, *, always: bool) -> Features | None:
        """The features of a micro-batch's images, merged [V, C] and those of deepstack; None where the tower needn't
        run. Without an image, `always` gives the features of a blank one."""
        if batch.visual_rows is None:
            return self.compute(*blank(self.tower)) if always else None
        if self.cache is not None and batch.media:
            return self._with_kept(batch, self.cache, always)
        assert batch.pixel_values is not None
        return self.compute(batch.pixel_values, batch.grids)

    def compute(self, pixels: Patches | Tensor, grids: Sequence[Grid]) -> Features:
        """The features of patches [P], by the fast way where there is one."""
        dtype = self.tower.patch_embed.proj.weight.dtype
        numbers = pixels.to(dtype) if isinstance(pixels, Tensor) else pixels.numbers(dtype)
        return self._compute(numbers, grids)  # type: ignore[no-any-return]

    def _with_kept(self, batch: MicroBatch, cache: FeatureCache, always: bool) -> Features:
        kept = {key for key in batch.media if key in cache}
        new = [key for key in batch.media if key not in kept]
        cache.count(len(kept), len(batch.media))
        pieces: dict[MediaKey, Tensor] = {}
        if new:
            merged, deep = self.compute(_patches_of(batch, new), [grid for _, grid in new])
            tokens = [patches(key) // self.tower.spatial_merge_size**2 for key in new]
            pieces.update(zip(new, torch.stack([merged, *deep], dim=1).split(tokens), strict=True))
        elif always:
            self.compute(*blank(self.tower))
        old = [key for key in batch.media if key in kept]
        pieces.update(zip(old, cache.take(old), strict=True))
        for key in new:
            cache.put(key, pieces[key])
        merged, *deep = torch.cat([pieces[key] for key in batch.media]).unbind(1)
        return merged, deep


class PlainTower:
    """transformers' own forward, without a graph where nothing in it trains."""

    def __init__(self, tower: Any) -> None:
        self.tower, self.trains = tower, _trains(tower)

    def __call__(self, pixels: Tensor, grids: Sequence[Grid]) -> Features:
        """As FrozenTower."""
        with nullcontext() if self.trains else torch.no_grad():
            out = self.tower(pixels, grid_thw=torch.tensor(grids, device=pixels.device))
        return out.pooler_output, list(getattr(out, "deepstack_features", None) or ())


def _way(tower: Any, family: Family, attend: Attend, shards: str | None) -> Any:
    """What computes features of (pixels, grids)."""
    if why_plain(tower, family, shards=shards) is not None:
        return PlainTower(tower)
    if shards is None:
        return FrozenTower(tower, attend)
    install(tower, attend)
    return tower


def make_sight(
    tower: Any, family: Family, kernel: str, cache_gib: float, device: torch.device, *, shards: str | None = None
) -> Sight:
    """A model's Sight, with a kernel of launcher.training.attention and a cache of so many GiB, 0 for none.

    `shards`: see why_plain.
    """
    cache = FeatureCache(int(cache_gib * 2**30), device) if cache_gib else None
    return Sight(tower, family, attend_with(kernel), cache, shards=shards)


def attend_with(kernel: str) -> Attend:
    """A kernel of launcher.training.attention for whole images: not causal, no prefix."""
    if kernel in PADDED:
        return lambda q, k, v, layout, scale: attention._whole_images(q, k, v, layout.cu_q, scale)
    function = attention.KERNELS[kernel]
    return lambda q, k, v, layout, scale: function(q, k, v, layout, scale, causal=False)


def blank(tower: Any) -> tuple[Tensor, list[Grid]]:
    """Pixels and grid of the smallest image."""
    merge, config, weight = tower.spatial_merge_size, tower.config, tower.patch_embed.proj.weight
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return torch.zeros(merge * merge, width, device=weight.device), [(1, merge, merge)]


def patches(key: MediaKey) -> int:
    """Patches of an image or video."""
    return math.prod(key[1])


def _trains(tower: Any) -> bool:
    return any(parameter.requires_grad for parameter in tower.parameters())


def _patches_of(batch: MicroBatch, keys: Sequence[MediaKey]) -> Patches | Tensor:
    """Patch rows of some of a micro-batch's media, all of which were decoded."""
    pixels, decoded = batch.pixel_values, [key for key, here in batch.media.items() if here]
    assert pixels is not None
    if len(keys) == len(decoded):
        return pixels
    values = pixels if isinstance(pixels, Tensor) else pixels.values
    rows = dict(zip(decoded, values.split([patches(key) for key in decoded]), strict=True))
    some = torch.cat([rows[key] for key in keys])
    return some if isinstance(pixels, Tensor) else replace(pixels, values=some)
