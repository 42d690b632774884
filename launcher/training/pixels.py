"""Decoded images and video frames as patch rows, the most recent ones kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.training.images import open_image
from launcher.training.media import Grid
from launcher.training.pieces import MediaKey, MediaSlot
from launcher.training.rows import Image
from launcher.training.video import PAIR, read_frames

if TYPE_CHECKING:
    import torch


class Pixels:
    """Patch rows of an image or video; a small data set's are decoded once, a large one's as they come."""

    def __init__(self, processor: Any, cache_bytes: int = 256 * 2**20) -> None:
        """`processor` is the model's; one without an image processor has no media to show."""
        self.processor = processor
        self._cache: OrderedDict[MediaKey, np.ndarray] = OrderedDict()
        self._room = cache_bytes
        self._lock = Lock()

    def rows(self, slot: MediaSlot) -> np.ndarray:
        """[patches, channels * temporal * patch * patch] float32; raises images.MediaError for a bad file."""
        with self._lock:
            if slot.key in self._cache:
                self._cache.move_to_end(slot.key)
                return self._cache[slot.key]
        rows = self._patches(slot).numpy()
        with self._lock:
            if slot.key not in self._cache:
                self._cache[slot.key] = rows
                self._room -= rows.nbytes
            while self._room < 0:
                self._room += self._cache.popitem(last=False)[1].nbytes
        return rows

    def _patches(self, slot: MediaSlot) -> torch.Tensor:
        if not isinstance(slot.media, Image):
            return video_patches(read_frames(slot.media), slot.grid, self.processor.video_processor)
        image_processor = self.processor.image_processor
        size = tuple(side * image_processor.patch_size for side in (slot.grid[2], slot.grid[1]))
        return patchify([open_image(slot.media, size)], [slot.grid], image_processor)[0]


def patchify(images: Sequence[Any], grids: Sequence[Grid], image_processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(pixel_values float32 [patches of all images, 3*2*patch*patch], grid_thw int64 [images, 3]) of Pillow images.

    Each picture is scaled to its planned grid exactly, so its tokens can't differ from those counted before
    decoding; scaling, normalisation and patch order are the Hugging Face image processor's.
    """
    import torch
    from torchvision.transforms.v2 import functional

    pixels = [
        _scaled(functional.pil_to_tensor(picture), grid, image_processor.patch_size)
        for picture, grid in zip(images, grids, strict=True)
    ]
    batch = image_processor(images=pixels, do_resize=False, return_tensors="pt")
    expected = torch.tensor(grids, dtype=torch.int64)
    assert torch.equal(batch["image_grid_thw"], expected), "the image processor made other grids than planned"
    return batch["pixel_values"].float(), expected


def video_patches(frames: Iterable[np.ndarray], grid: Grid, video_processor: Any) -> torch.Tensor:
    """pixel_values float32 [t * h * w, 3*2*patch*patch] of frames [height, width, 3] uint8.

    Each frame is scaled as soon as it is decoded: a film's frames in full size would take gigabytes.
    """
    import torch

    scaled = [
        _scaled(torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1), grid, video_processor.patch_size)
        for frame in frames
    ]
    assert len(scaled) == grid[0] * PAIR, "other frames came than planned"
    options: dict[str, Any] = {"do_resize": False, "do_sample_frames": False}
    if hasattr(video_processor, "cap_pixels_per_frame"):  # of no effect without resizing, and warned of when not set
        options["cap_pixels_per_frame"] = False
    batch = video_processor(videos=[torch.stack(scaled)], return_tensors="pt", **options)
    assert batch["video_grid_thw"].tolist() == [list(grid)], "the video processor made another grid than planned"
    return batch["pixel_values_videos"].float()


def _scaled(pixels: torch.Tensor, grid: Grid, patch: int) -> torch.Tensor:
    """uint8 [3, height, width] as large as its grid, as transformers' torchvision backend scales: bicubic with
    antialiasing on the bytes."""
    from torchvision.transforms.v2 import functional

    size = [grid[1] * patch, grid[2] * patch]
    if list(pixels.shape[1:]) == size:
        return pixels
    return functional.resize(pixels, size, functional.InterpolationMode.BICUBIC, antialias=True)
