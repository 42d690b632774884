"""How large an image or a video stands in a prompt: its patches and frames, known before its pixels are decoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.families import family_of
from launcher.spec import RunPlan, VideoOptions
from launcher.training.images import ImageError, MediaError, image_size, smart_resize
from launcher.training.rows import Image, Video
from launcher.training.video import PAIR, Clip, VideoError, choose_frames, video_facts

Grid = tuple[int, int, int]  # patches: (temporal, height, width); temporal is 1 for an image


@dataclass(frozen=True, slots=True)
class MediaRule:
    """Pixel limits and patch sizes of a run, and how its model family writes videos."""

    patch_size: int
    merge_size: int
    min_pixels: int  # the data set's, else the model's; a picture's own limits win
    max_pixels: int
    video: VideoOptions
    timestamps: bool  # <T seconds> before each temporal patch (Qwen3-VL), or all of them in one run (Qwen2.5-VL)
    tokens_per_second: float | None = None  # Qwen2.5-VL: temporal positions in a second

    @property
    def factor(self) -> int:
        """Both sides are multiples of so many pixels: 32 for Qwen3-VL, 28 for Qwen2.5-VL."""
        return self.patch_size * self.merge_size

    def image(self, image: Image, scale: float = 1.0) -> Grid:
        """An image's grid; `scale` below 1 is the part of its area to keep. Raises ImageError."""
        low, high = limits(image.min_pixels, image.max_pixels, self.min_pixels, self.max_pixels)
        width, height = image_size(image)
        return self._grid(image, ImageError, 1, height, width, low, high, scale)

    def clip(self, video: Video, scale: float = 1.0) -> tuple[Clip, Grid]:
        """A video's frames and their grid. Raises VideoError, or ImageError for a list of frames.

        A frame has at most its own limit (the row's, else dataset.video.max_pixels), no more than an image may have
        unless the row says so, and an even share of dataset.video.total_pixels; but at least min_pixels.
        """
        clip, facts = choose_frames(video, self.video), video_facts(video, self.video)
        most = min(self.video.max_pixels, self.max_pixels)
        low, most = limits(video.min_pixels, video.max_pixels, min(self.min_pixels, most), most)
        high = max(low, min(most, self.video.total_pixels // len(clip.frames)))
        pairs = len(clip.frames) // PAIR
        return clip, self._grid(video, VideoError, pairs, facts.height, facts.width, low, high, scale)

    def interval(self, clip: Clip) -> float:
        """Position ids from one temporal patch to the next."""
        return 1.0 if self.tokens_per_second is None else self.tokens_per_second * PAIR / clip.sampled_fps

    def _grid(
        self, media: Any, kind: Callable[..., MediaError], t: int, height: float, width: float, low: int, high: int,
        scale: float,
    ) -> Grid:  # fmt: skip
        if low > high:
            raise kind(media, f"its min_pixels={low} is above its max_pixels={high}")
        try:
            rows, columns = smart_resize(height, width, self.factor, low, high)
            if scale < 1:
                side = math.sqrt(scale * rows * columns / (height * width))
                rows, columns = smart_resize(height * side, width * side, self.factor, low, high)
        except ValueError as error:
            raise kind(media, str(error)) from None
        return t, rows // self.patch_size, columns // self.patch_size


def limits(own_low: int | None, own_high: int | None, low: int, high: int) -> tuple[int, int]:
    """A picture's own limits where it has them; a single one of its own moves the other out of its way.

    Example:
        >>> limits(None, 1024, 4096, 65536)
        (1024, 1024)
    """
    found = own_low or low, own_high or high
    alone = own_low if own_high is None else own_high if own_low is None else None
    return (alone, alone) if alone is not None and found[0] > found[1] else found


def media_rule(plan: RunPlan, processor: Any) -> MediaRule | None:
    """The rule of a plan's data set and model; None for a model that reads text only."""
    image = getattr(processor, "image_processor", None)
    if image is None:
        return None
    data, size = plan.config.dataset, image.size
    low, high = limits(data.min_pixels, data.max_pixels, size["shortest_edge"], size["longest_edge"])
    # Only Qwen2.5-VL's towers have this number; 4 is what transformers takes where the model's files have none.
    spread = family_of(plan.config.model, plan.arch).tower == "qwen2_5"
    tokens_per_second = plan.arch.get("vision_config", {}).get("tokens_per_second", 4) if spread else None
    return MediaRule(
        patch_size=image.patch_size,
        merge_size=image.merge_size,
        min_pixels=low,
        max_pixels=high,
        video=data.video,
        timestamps=not spread,
        tokens_per_second=tokens_per_second,
    )
