"""What a vision tower needs to know of its images' grids: position embeddings, rotary tables, bounds, windows.

transformers computes them for all patches in every forward; here they are kept for each distinct grid of a frame.
Its own functions make them, so that they follow its version.

Shapes: P patches of all images, F patches of one frame, H width of the tower, d head size, u patches that are merged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from launcher.training.attention import Layout
from launcher.training.media import Grid

ROOM = 128 * 2**20  # bytes on the device; a page of 72 x 56 patches takes 10 MB in the 8B model's tower


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The tables of one frame; with windows its rows are in their order."""

    places: Tensor | None  # [F, H] position embeddings and the patch embedding's bias
    cos: Tensor  # [F, d / 2] float32
    sin: Tensor
    order: Tensor | None  # [F / u] which merged patch comes at this place; None: as they are
    windows: tuple[int, ...]  # patches of each

    @property
    def size(self) -> int:
        """Bytes on the device."""
        return sum(t.nbytes for t in (self.places, self.cos, self.sin, self.order) if t is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Those of all images of one forward, frame after frame."""

    places: Tensor | None  # [P, H], free to be written over
    cos: Tensor  # [P, d / 2]
    sin: Tensor
    order: Tensor | None  # [P / u]
    whole: Layout  # attention within a frame
    windowed: Layout | None  # within a window


class TableMaker:
    """Makes the tables of a tower's forwards; the frames used last stay on its device."""

    def __init__(self, tower: Any) -> None:
        self.tower = tower
        self._frames: OrderedDict[tuple[int, int], Frame] = OrderedDict()
        self._room = ROOM

    def of(self, grids: Sequence[Grid]) -> Tables:
        """The tables of images and videos with these grids, in their order."""
        shapes = [(rows, columns) for frames, rows, columns in grids for _ in range(frames)]
        frames = [self._frame(*shape) for shape in shapes]
        device = frames[0].cos.device
        patches = [len(frame.cos) for frame in frames]
        windows = [window for frame in frames for window in frame.windows]
        return Tables(
            places=None if frames[0].places is None else torch.cat([f.places for f in frames]),  # type: ignore[misc]
            cos=torch.cat([frame.cos for frame in frames]),
            sin=torch.cat([frame.sin for frame in frames]),
            order=self._order(frames),
            whole=_layout(patches, device),
            windowed=_layout(windows, device) if windows else None,
        )

    def _order(self, frames: Sequence[Frame]) -> Tensor | None:
        found, before = [], 0
        for frame in frames:
            if frame.order is None:
                return None
            found.append(frame.order + before)
            before += len(frame.order)
        return torch.cat(found)

    def _frame(self, rows: int, columns: int) -> Frame:
        key = (rows, columns)
        if key in self._frames:
            self._frames.move_to_end(key)
            return self._frames[key]
        frame = self._frames[key] = make_frame(self.tower, rows, columns)
        self._room -= frame.size
        while self._room < 0 and len(self._frames) > 1:
            self._room += self._frames.popitem(last=False)[1].size
        return frame


def _layout(lengths: Sequence[int], device: torch.device) -> Layout:
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    return Layout(bounds, bounds, None, max(lengths), max(lengths))


def make_frame(tower: Any, rows: int, columns: int) -> Frame:
    """The tables of a frame of `rows` x `columns` patches, as transformers' forward has them."""
    from transformers import vision_utils

    grid, merge = torch.tensor([[1, rows, columns]]), tower.spatial_merge_size
    device = tower.patch_embed.proj.weight.device
    ids = vision_utils.get_vision_position_ids(grid, merge).to(device)
    # Not as a module: ZeRO-3 wants the same ones called on every rank, and another rank may know this size.
    turns = tower.rotary_pos_emb.forward(tower.patch_embed.proj.weight, ids)
    cos, sin = (turn[:, : turn.shape[1] // 2].float() for turn in turns)  # the second half of a head is as the first
    order, windows = None, ()
    if hasattr(tower, "window_size"):
        sizes = {"window_size": tower.window_size, "patch_size": tower.patch_size}
        order, bounds = vision_utils.get_vision_window_index(grid, spatial_merge_size=merge, **sizes)
        windows = tuple(bounds.diff().tolist())
        order = order.to(device)
        cos, sin = (in_order(turn, order) for turn in (cos, sin))
    return Frame(
        places=_places(tower, grid) if hasattr(tower, "pos_embed") else None,
        cos=cos.contiguous(),
        sin=sin.contiguous(),
        order=order,
        windows=windows,
    )


def in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Rows [P, ...] with the merged patches, each some rows, in another order [P / u]."""
    return rows.unflatten(0, (len(order), -1))[order].flatten(0, 1)


def _places(tower: Any, grid: Tensor) -> Tensor:
    """Position embeddings scaled to a grid, with the bias of the patch embedding: [F, H]."""
    from transformers import vision_utils

    proj, table = tower.patch_embed.proj, tower.pos_embed.weight
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    scaled = (table[indices.to(table.device)].float() * weights.to(table.device)[:, :, None]).sum(1)
    return (scaled if proj.bias is None else scaled + proj.bias.float()).to(proj.weight.dtype)
