"""Decoded images and video frames as patch rows of bytes, the most recent ones kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import torch

from launcher.training.images import open_image
from launcher.training.media import Grid
from launcher.training.patches import Patches, byte_table, patch_rows
from launcher.training.pieces import MediaKey, MediaSlot
from launcher.training.rows import Image
from launcher.training.video import PAIR, read_frames


class Pixels:
    """Patch rows of an image or video; a small data set's are decoded once, a large one's as they come.

    Any number of threads may ask.
    """

    def __init__(self, processor: Any, cache_bytes: int = 256 * 2**20) -> None:
        """`processor` is the model's; one without an image processor has no media to show."""
        self.processor = processor
        self._cache: OrderedDict[MediaKey, Patches] = OrderedDict()
        self._room = cache_bytes
        self._lock = Lock()

    def rows(self, slot: MediaSlot) -> Patches:
        """A medium's rows at its planned size; raises images.MediaError for a bad file."""
        with self._lock:
            if slot.key in self._cache:
                self._cache.move_to_end(slot.key)
                return self._cache[slot.key]
        found = self._patches(slot)
        with self._lock:
            if slot.key not in self._cache:
                self._cache[slot.key] = found
                self._room -= found.values.nbytes
            while self._room < 0:
                self._room += self._cache.popitem(last=False)[1].values.nbytes
        return found

    def _patches(self, slot: MediaSlot) -> Patches:
        if not isinstance(slot.media, Image):
            options = self.processor.video_processor
            frames = scaled_frames(read_frames(slot.media), slot.grid, options.patch_size)
            rows = patch_rows(frames, options.patch_size, options.merge_size)
            return Patches(torch.from_numpy(rows), self._film_table, 1)
        options = self.processor.image_processor
        size = (slot.grid[2] * options.patch_size, slot.grid[1] * options.patch_size)
        picture = scaled(np.asarray(open_image(slot.media, size)), size)
        rows = patch_rows(picture[None, None], options.patch_size, options.merge_size)
        return Patches(torch.from_numpy(rows), self._table, options.temporal_patch_size)

    @cached_property
    def _table(self) -> torch.Tensor:
        return byte_table(self.processor.image_processor)

    @cached_property
    def _film_table(self) -> torch.Tensor:
        """The images' own: both go through the same tower, in one call."""
        found = byte_table(self.processor.video_processor, film=True)
        if not torch.equal(found, self._table):
            raise RuntimeError("the model's video processor normalises pixels in another way than its image processor")
        return self._table


def scaled(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [height, width, 3] as large as `size` (width, height) exactly, so that its tokens can't differ from those
    counted before decoding; scaled as transformers' torchvision backend does: bicubic with antialiasing on the bytes.
    """
    if picture.shape[1::-1] == size:
        return picture
    from torchvision.transforms.v2 import functional

    # A view with the channels last is scaled to the same bytes, and spares two copies of the picture. A copy all the
    # same where Pillow's memory is read-only, which torch does not know.
    writable = picture if picture.flags.writeable else picture.copy()
    channels_first = torch.from_numpy(writable).permute(2, 0, 1)
    small = functional.resize(channels_first, [size[1], size[0]], functional.InterpolationMode.BICUBIC, antialias=True)
    return small.permute(1, 2, 0).numpy()


def scaled_frames(frames: Iterable[np.ndarray], grid: Grid, side: int) -> np.ndarray:
    """[t, PAIR, h * side, w * side, 3] uint8 of frames [height, width, 3].

    Each frame is scaled as soon as it is decoded: a film's frames in full size would take gigabytes.
    """
    size = (grid[2] * side, grid[1] * side)
    small = [scaled(np.ascontiguousarray(frame), size) for frame in frames]
    assert len(small) == grid[0] * PAIR, "other frames came than planned"
    return np.stack(small).reshape(grid[0], PAIR, size[1], size[0], 3)
