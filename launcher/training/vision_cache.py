"""Features of a frozen vision tower kept in main memory, so that an image goes through the tower once in a run.

What came first stays, and nothing is put out. Epochs come in a new order each: of a cache that holds a share f of
the images, the next epoch then finds f of them; put out by age, it would find f + (1 - f) ln(1 - f), 0.15 for a
half. And what is known to be here is here for good, which lets the data thread spare decoding it.

Shapes: V visual tokens of one image or video, K maps of features (the merged ones and those of deepstack), C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from launcher.training.pieces import MediaKey

SLAB_BYTES = 256 * 2**20  # what is taken from the system at once; torch rounds pinned memory up to a power of two


class FeatureCache:
    """Features [V, K, C] by image: pinned memory beside a GPU, which is copied from and to while it computes.

    All copies run in one stream of their own, so that what is read was written.
    """

    def __init__(self, room_bytes: int, device: torch.device) -> None:
        self.device = device
        self._slabs_left = room_bytes // SLAB_BYTES
        self._kept: dict[MediaKey, Tensor] = {}  # views of slabs
        self._slab: Tensor | None = None  # [rows, K, C], the one being filled
        self._next: Future[Tensor] | None = None  # pinning takes a while: the slab after it is made in a thread
        self._used = 0  # rows of the slab
        self._kept_bytes = self._asked = self._found = self._refused = 0
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="pin")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def count(self, found: int, asked: int) -> None:
        """Note that so many of the images of a micro-batch were here."""
        self._found, self._asked = self._found + found, self._asked + asked

    def told(self) -> str:
        """What it holds and what it was good for."""
        share = 100 * self._found / max(1, self._asked)
        full = ", and it is full" if self._refused else ""
        held = f"{len(self):,} images in {self._kept_bytes / 2**30:,.2f} GiB{full}"
        return f"{held}; of {self._asked:,} that were needed, {self._found:,} were here ({share:.0f} %)"

    def put(self, key: MediaKey, features: Tensor) -> None:
        """Keep a copy of features [V, K, C], if there is room; what is kept already stays."""
        if key in self._kept:
            return
        if (place := self._place(features)) is None:
            self._refused += 1
            return
        if self._stream is None:
            place.copy_(features)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                place.copy_(features, non_blocking=True)
            features.record_stream(self._stream)
        self._kept[key] = place
        self._kept_bytes += features.nbytes

    def take(self, keys: Sequence[MediaKey]) -> list[Tensor]:
        """The features of images that are kept, each [V, K, C] on the device."""
        if self._stream is None:
            return [self._kept[key] for key in keys]
        with torch.cuda.stream(self._stream):
            found = [self._kept[key].to(self.device, non_blocking=True) for key in keys]
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for features in found:
            features.record_stream(current)
        return found

    def _place(self, features: Tensor) -> Tensor | None:
        """Free rows for features; None without room for them."""
        rows = max(1, SLAB_BYTES // features[0].nbytes)
        if len(features) > rows:
            return None
        if self._slab is None or self._used + len(features) > len(self._slab):
            slab = self._next_slab(rows, features)
            if slab is None:
                return None
            self._slab, self._used = slab, 0
        begin, self._used = self._used, self._used + len(features)
        return self._slab[begin : self._used]

    def _next_slab(self, rows: int, like: Tensor) -> Tensor | None:
        if self._next is None:
            self._order(rows, like)
        made, self._next = self._next, None
        self._order(rows, like)
        return None if made is None else made.result()

    def _order(self, rows: int, like: Tensor) -> None:
        if self._slabs_left <= 0:
            return
        self._slabs_left -= 1
        self._next = self._maker.submit(self._new_slab, (rows, *like.shape[1:]), like.dtype)

    def _new_slab(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # A new thread's device is the first, and pinning there would take some of its memory.
        with nullcontext() if self._stream is None else torch.cuda.device(self.device):
            return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)
