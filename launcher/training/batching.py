"""Divide a global batch over ranks and micro-batches, and pack a micro-batch into tensors.

Shapes: T packed tokens, S attention segments, K key rows of all segments, D documents, V visual tokens,
N distinct images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from launcher.spec import CostModel
from launcher.training.attention import Layout, make_layout
from launcher.training.encoding import EncodedGroup, ImageKey, ImageSlot
from launcher.training.jsonl import RowError


@dataclass(frozen=True, slots=True)
class Unit:
    """Work that stays on one rank: a group, or some of its documents when the loss allows."""

    index: int  # of the group in the global batch
    documents: tuple[int, ...]
    tokens: int
    cost: float


def make_units(groups: Sequence[EncodedGroup], cost: CostModel, max_tokens: int, *, splittable: bool) -> list[Unit]:
    """One unit a group; a group above `max_tokens` is split by documents when `splittable`.

    Raises RowError for a group that fits no micro-batch.
    """
    units = []
    for index, group in enumerate(groups):
        share = group.cost(cost) / max(group.tokens, 1)
        chunks = _chunks(group, max_tokens) if splittable else [tuple(range(len(group.prompts)))]
        for chunk in chunks:
            tokens = group.prefix + sum(len(group.prompts[d]) - group.prefix for d in chunk)
            if tokens > max_tokens:
                raise RowError(
                    f"{group.group.where}: row {group.group.id}: {len(chunk)} documents need {tokens} tokens in one "
                    f"micro-batch and batch.max_tokens={max_tokens}; raise it, or give the row fewer documents"
                )
            units.append(Unit(index, chunk, tokens, share * tokens))
    return units


def _chunks(group: EncodedGroup, max_tokens: int) -> list[tuple[int, ...]]:
    chunks: list[list[int]] = [[]]
    used = group.prefix
    for d, prompt in enumerate(group.prompts):
        own = len(prompt) - group.prefix
        if chunks[-1] and used + own > max_tokens:
            chunks.append([])
            used = group.prefix
        chunks[-1].append(d)
        used += own
    return [tuple(chunk) for chunk in chunks]


def split_step(units: Sequence[Unit], world_size: int, max_tokens: int) -> list[list[list[Unit]]]:
    """Units as [rank][micro-step] lists: few micro-steps, equal in number on every rank, near-equal in cost.

    A pure function of its arguments: every rank computes the same division. Some micro-batches may be empty.
    The time of a micro-step is that of its slowest rank, so bins of like cost share a micro-step.
    """
    steps = max(1, math.ceil(sum(u.tokens for u in units) / (world_size * max_tokens)))
    order = sorted(units, key=lambda u: (-u.cost, u.index, u.documents))
    while (bins := _fill(order, steps * world_size, max_tokens)) is None:
        steps += 1
    bins.sort(key=lambda b: -sum(u.cost for u in b))
    rows = [bins[i * world_size : (i + 1) * world_size] for i in range(steps)]
    # The heavy end of a micro-step moves round the ranks, so that no rank is last every time.
    return [[sorted(row[(rank + i) % world_size], key=lambda u: u.index) for i, row in enumerate(rows)]
            for rank in range(world_size)]  # fmt: skip


def _fill(order: Sequence[Unit], count: int, max_tokens: int) -> list[list[Unit]] | None:
    """Longest-processing-time-first into `count` bins of `max_tokens`; None when it doesn't fit."""
    bins: list[list[Unit]] = [[] for _ in range(count)]
    tokens, cost = [0] * count, [0.0] * count
    for unit in order:
        fits = [b for b in range(count) if tokens[b] + unit.tokens <= max_tokens]
        if not fits:
            return None
        best = min(fits, key=lambda b: (cost[b], b))
        bins[best].append(unit)
        tokens[best] += unit.tokens
        cost[best] += unit.cost
    return bins


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed tensors of one forward pass."""

    input_ids: torch.Tensor  # [T]
    position_ids: torch.Tensor  # [3, T]
    layout: Layout
    last: torch.Tensor  # [D] row of each document's last token
    labels: torch.Tensor  # [D] float32
    group: torch.Tensor  # [D] which group of the global batch a document belongs to
    pixel_values: torch.Tensor | None  # [patches, 3 * 2 * patch * patch], each distinct image once
    grid_thw: torch.Tensor | None  # [N, 3]
    visual_rows: torch.Tensor | None  # [V] rows of the packed sequence that are visual tokens, ascending
    visual_source: torch.Tensor | None  # [V] which row of the tower's output goes there

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on a device; copies may overlap with computation."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor | Layout):
                moved[field.name] = value.to(device, non_blocking=True)
        return replace(self, **moved)

    @property
    def tokens(self) -> int:
        """Packed tokens."""
        return len(self.input_ids)


def collate(
    groups: Sequence[EncodedGroup], units: Sequence[Unit], pixels: Mapping[ImageKey, np.ndarray], *, padded: bool
) -> MicroBatch:
    """Pack units into one micro-batch; `pixels` holds their images' patch rows. `padded` also lays out the CPU kernel's
    segments. An empty micro-batch holds one token and no document."""
    builder = _Builder()
    for unit in units:
        builder.add(groups[unit.index], unit)
    return builder.build(pixels, padded=padded)


class _Builder:
    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.queries: list[tuple[int, int]] = []  # segment: its rows
        self.prefixes: list[tuple[int, int]] = []  # segment: rows before its own that it also attends to
        self.last: list[int] = []
        self.labels: list[float] = []
        self.group: list[int] = []
        self.visual: list[tuple[int, ImageSlot]] = []  # (row, image)
        self.size = 0

    def add(self, group: EncodedGroup, unit: Unit) -> None:
        prefix = (self.size, self.size)
        if group.prefix:
            first = group.prompts[unit.documents[0]]
            prefix = self._segment(first, 0, group.prefix, (self.size, self.size))
        for d in unit.documents:
            prompt = group.prompts[d]
            self._segment(prompt, group.prefix, len(prompt), prefix)
            self.last.append(self.size - 1)
            self.labels.append(group.group.labels[d])
            self.group.append(unit.index)

    def _segment(self, prompt: Any, begin: int, end: int, prefix: tuple[int, int]) -> tuple[int, int]:
        rows = (self.size, self.size + end - begin)
        self.ids.append(prompt.ids[begin:end])
        self.positions.append(prompt.positions[:, begin:end])
        self.visual += [(rows[0] + s.start - begin, s) for s in prompt.images if begin <= s.start < end]
        self.queries.append(rows)
        self.prefixes.append(prefix)
        self.size = rows[1]
        return rows

    def build(self, pixels: Mapping[ImageKey, np.ndarray], *, padded: bool) -> MicroBatch:
        if not self.ids:
            self.ids, self.positions = [np.zeros(1, np.int64)], [np.zeros((3, 1), np.int64)]
            self.queries, self.prefixes = [(0, 1)], [(0, 0)]
        return MicroBatch(
            input_ids=torch.from_numpy(np.concatenate(self.ids)),
            position_ids=torch.from_numpy(np.concatenate(self.positions, axis=1)),
            layout=make_layout(self.queries, self.prefixes, padded=padded),
            last=torch.tensor(self.last, dtype=torch.int64),
            labels=torch.tensor(self.labels, dtype=torch.float32),
            group=torch.tensor(self.group, dtype=torch.int64),
            **self._images(pixels),
        )

    def _images(self, pixels: Mapping[ImageKey, np.ndarray]) -> dict[str, torch.Tensor | None]:
        if not self.visual:
            return dict.fromkeys(("pixel_values", "grid_thw", "visual_rows", "visual_source"))
        distinct = list({slot.key: slot for _, slot in self.visual}.values())
        starts = np.cumsum([0, *(slot.tokens for slot in distinct)])
        source = {slot.key: int(start) for slot, start in zip(distinct, starts, strict=False)}
        rows = [np.arange(row, row + s.tokens) for row, s in self.visual]
        origin = [np.arange(s.tokens) + source[s.key] for _, s in self.visual]
        return {
            "pixel_values": torch.from_numpy(np.concatenate([pixels[slot.key] for slot in distinct])),
            "grid_thw": torch.tensor([slot.grid for slot in distinct]),
            "visual_rows": torch.from_numpy(np.concatenate(rows)),
            "visual_source": torch.from_numpy(np.concatenate(origin)),
        }
