"""Pictures and films as patch rows of bytes; they become the tower's numbers on its own device.

A byte takes an eighth of the main memory, and of the way to the GPU, of the float32 pair of frames that an image
processor makes of a picture. The numbers are those of the processor, to the last bit.

Shapes: P patches, C channels, F frames of a temporal patch (1: a picture, shown in all of them), s side of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

CHANNELS = 3
ROWS = 8192  # decoded at a time: a micro-batch's indices as int32 would take four times its bytes


@dataclass(frozen=True, slots=True)
class Patches:
    """Patch rows of one or more pictures and films, in the order of transformers' image processors."""

    values: torch.Tensor  # [P, C * F * s * s] uint8
    table: torch.Tensor  # [C, 256] float32: what a byte of a channel stands for
    repeats: int  # frames that each row is shown in: 2 for pictures, 1 where films are among them

    def __len__(self) -> int:
        return len(self.values)

    def to(self, device: torch.device, non_blocking: bool = False) -> Patches:
        """The same on a device."""
        values, table = (t.to(device, non_blocking=non_blocking) for t in (self.values, self.table))
        return Patches(values, table, self.repeats)

    def numbers(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[P, C * frames * s * s] as the tower takes them."""
        count, device = len(self.values), self.values.device
        values = self.values.view(count, CHANNELS, -1)
        table = self.table.to(dtype).reshape(-1)
        first = torch.arange(CHANNELS, dtype=torch.int32, device=device)[:, None] * 256
        out = torch.empty(count, CHANNELS, self.repeats, values.shape[2], dtype=dtype, device=device)
        for begin in range(0, count, ROWS):
            index = values[begin : begin + ROWS] + first
            out[begin : begin + ROWS] = table.index_select(0, index.view(-1)).view(index.shape)[:, :, None]
        return out.view(count, -1)

    def changed(self) -> Patches:
        """Others that differ in every number, by half of the range."""
        return Patches(self.values ^ 128, self.table, self.repeats)


def joined(parts: Sequence[Patches], *, pin: bool = False) -> Patches:
    """The rows of all parts; `pin` puts them into page-locked memory, which a GPU reads while the host goes on."""
    repeats = min(part.repeats for part in parts)
    shapes = [(len(part), CHANNELS, part.repeats // repeats, part.values.shape[1] // CHANNELS) for part in parts]
    width = CHANNELS * shapes[0][2] * shapes[0][3]
    out = torch.empty(sum(map(len, parts)), width, dtype=torch.uint8, pin_memory=pin)
    at = 0
    for part, (rows, channels, times, size) in zip(parts, shapes, strict=True):
        # NumPy's copies: torch would start threads of its own for each thread that comes here.
        target = out.numpy()[at : at + rows].reshape(rows, channels, times, size)
        np.copyto(target, part.values.numpy().reshape(rows, channels, 1, size))
        at += rows
    return Patches(out, parts[0].table, repeats)


def patch_rows(frames: np.ndarray, side: int, merge: int) -> np.ndarray:
    """[t * h * w, C * F * side * side] uint8 of frames [t, F, h * side, w * side, C]; patches that merge into one
    visual token, `merge` by `merge`, follow one another."""
    times, together, height, width, channels = frames.shape
    tiles = frames.reshape(
        times, together, height // side // merge, merge, side, width // side // merge, merge, side, channels
    )
    rows = tiles.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(rows).reshape(-1, channels * together * side * side)


def byte_table(processor: Any, *, film: bool = False) -> torch.Tensor:
    """[C, 256] float32: what an image processor (`film`: a video processor) makes of each byte of a channel.

    Read off the processor itself, with the order in which it lays out patches; RuntimeError for an unknown order.
    """
    side, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    edge = side * merge
    columns = -(-256 // edge**2) * edge
    pixels = np.arange(frames * edge * columns * CHANNELS) * 89 % 256  # 89 is odd: every byte comes in each channel
    shown = pixels.astype(np.uint8).reshape(frames, CHANNELS, edge, columns)
    shown = shown if film else np.repeat(shown[:1], frames, axis=0)
    given = torch.from_numpy(shown)
    options: dict[str, Any] = {"do_resize": False, "return_tensors": "pt"}
    if film:
        options["do_sample_frames"] = False
        if hasattr(processor, "cap_pixels_per_frame"):  # of no effect without resizing, and warned of when not set
            options["cap_pixels_per_frame"] = False
        theirs = processor(videos=[given], **options)["pixel_values_videos"].float()
    else:
        theirs = processor(images=[given[0]], **options)["pixel_values"].float()
    rows = torch.from_numpy(patch_rows(shown.transpose(0, 2, 3, 1)[None], side, merge))
    values = rows.view(len(rows), CHANNELS, -1).long()
    table = torch.full((CHANNELS, 256), torch.nan)
    for channel in range(CHANNELS):
        table[channel, values[:, channel].reshape(-1)] = theirs.view(values.shape)[:, channel].reshape(-1)
    if not torch.equal(Patches(rows, table, 1).numbers(), theirs):
        raise RuntimeError(f"{type(processor).__name__} lays out patches in an order that is not known here")
    return table
