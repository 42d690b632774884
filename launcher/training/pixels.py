"""Decoded images as patch rows, the most recent ones kept."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import numpy as np

from launcher.training.encoding import ImageKey, ImageSlot
from launcher.training.images import open_image, patchify


class Pixels:
    """An image's patch rows; a small data set's images are decoded once, a large one's as they come."""

    def __init__(self, image_processor: Any, cache_bytes: int = 256 * 2**20) -> None:
        self.image_processor = image_processor
        self._cache: OrderedDict[ImageKey, np.ndarray] = OrderedDict()
        self._room = cache_bytes
        self._lock = Lock()

    def rows(self, slot: ImageSlot) -> np.ndarray:
        """[patches, channels * temporal * patch * patch] float32; raises images.ImageError for a bad file."""
        with self._lock:
            if slot.key in self._cache:
                self._cache.move_to_end(slot.key)
                return self._cache[slot.key]
        values, _ = patchify([open_image(slot.image)], [slot.grid], self.image_processor)
        rows = values.numpy()
        with self._lock:
            self._cache[slot.key] = rows
            self._room -= rows.nbytes
            while self._room < 0:
                self._room += self._cache.popitem(last=False)[1].nbytes
        return rows
