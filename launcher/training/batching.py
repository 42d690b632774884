"""Divide a global batch over ranks and micro-batches, and pack a micro-batch into tensors.

Shapes: T packed tokens, S attention segments, K key rows of all segments, D documents, V visual tokens,
N distinct images and videos, A answer tokens.
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
from launcher.training.encoding import Encoded
from launcher.training.jsonl import RowError
from launcher.training.pieces import MediaKey, MediaSlot
from launcher.training.rows import too_large


@dataclass(frozen=True, slots=True)
class Unit:
    """Work that stays on one rank: a group, or some of its documents when the loss allows."""

    index: int  # of the group in the global batch
    documents: tuple[int, ...]
    tokens: int
    cost: float
    longest: int = 0  # tokens of its longest document, where every document is padded to that of its micro-batch

    def beside(self, tokens: int, rows: int, longest: int) -> int:
        """Tokens computed by a micro-batch of so many tokens, in so many documents, once this unit is added to it."""
        return max(tokens + self.tokens, (rows + len(self.documents)) * max(longest, self.longest))


def make_units(
    groups: Sequence[Encoded], cost: CostModel, max_tokens: int, *, splittable: bool, padded_rows: bool = False
) -> list[Unit]:
    """One unit a group; a group above `max_tokens` is split by documents when `splittable`.

    `padded_rows`: the model cannot take packed documents, so that padding counts as tokens.
    Raises RowError for a group that fits no micro-batch.
    """
    units = []
    for index, group in enumerate(groups):
        share = group.cost(cost) / max(group.tokens, 1)
        whole = tuple(range(len(group.prompts)))
        chunks = _chunks(group, max_tokens, padded_rows) if splittable else [whole]
        for chunk in chunks:
            tokens = group.prefix + sum(len(group.prompts[d]) - group.prefix for d in chunk)
            longest = max(len(group.prompts[d]) for d in chunk) if padded_rows else 0
            unit = Unit(index, chunk, tokens, share * tokens, longest)
            if (needed := unit.beside(0, 0, 0)) > max_tokens:
                raise RowError(too_large(group.row, len(chunk), needed, max_tokens))
            units.append(unit)
    return units


def _chunks(group: Encoded, max_tokens: int, padded_rows: bool) -> list[tuple[int, ...]]:
    chunks: list[list[int]] = [[]]
    used, longest = group.prefix, 0
    for d, prompt in enumerate(group.prompts):
        own = len(prompt) - group.prefix
        longest = max(longest, len(prompt)) if padded_rows else 0
        if chunks[-1] and max(used + own, (len(chunks[-1]) + 1) * longest) > max_tokens:
            chunks.append([])
            used, longest = group.prefix, len(prompt) if padded_rows else 0
        chunks[-1].append(d)
        used += own
    return [tuple(chunk) for chunk in chunks]


def split_step(units: Sequence[Unit], speeds: Sequence[float], max_tokens: int) -> list[list[list[Unit]]]:
    """Units as [rank][micro-step] lists: few micro-steps, equal in number on every rank, near-equal in time.

    `speeds` has a rank's relative speed, so that its time is cost / speed. A pure function of its arguments: every
    rank computes the same division. Some micro-batches may be empty. The time of a micro-step is that of its
    slowest rank, so bins of like time share a micro-step.
    """
    fastest = max(speeds)
    # A slow rank fills part of its budget while the fastest fills all of it.
    steps = max(1, math.ceil(sum(u.tokens for u in units) / (sum(s / fastest for s in speeds) * max_tokens)))
    order = sorted(units, key=lambda u: (-u.cost, u.index, u.documents))
    ranks = range(len(speeds))
    while (bins := _fill(order, [*speeds] * steps, max_tokens)) is None:
        steps += 1
    shares: list[list[list[Unit]]] = [[] for _ in ranks]
    for speed in dict.fromkeys(speeds):
        alike = [rank for rank in ranks if speeds[rank] == speed]
        theirs = [bins[i * len(speeds) + rank] for i in range(steps) for rank in alike]
        theirs.sort(key=lambda b: -sum(u.cost for u in b))
        for i in range(steps):
            row = theirs[i * len(alike) : (i + 1) * len(alike)]
            for place, rank in enumerate(alike):
                # The heavy end of a micro-step moves round the ranks, so that no rank is last every time.
                shares[rank].append(sorted(row[(place + i) % len(alike)], key=lambda u: u.index))
    return shares


def _fill(order: Sequence[Unit], speeds: Sequence[float], max_tokens: int) -> list[list[Unit]] | None:
    """Longest-processing-time-first into bins of `max_tokens`, one for each of `speeds`; None when it doesn't fit."""
    count = len(speeds)
    bins: list[list[Unit]] = [[] for _ in range(count)]
    tokens, rows, longest, cost = [0] * count, [0] * count, [0] * count, [0.0] * count
    for unit in order:
        fits = [b for b in range(count) if unit.beside(tokens[b], rows[b], longest[b]) <= max_tokens]
        if not fits:
            return None
        best = min(fits, key=lambda b: ((cost[b] + unit.cost) / speeds[b], b))
        bins[best].append(unit)
        tokens[best] += unit.tokens
        rows[best] += len(unit.documents)
        longest[best] = max(longest[best], unit.longest)
        cost[best] += unit.cost
    return bins


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed tensors of one forward pass."""

    input_ids: torch.Tensor  # [T]
    position_ids: torch.Tensor  # [3, T]
    layout: Layout
    last: torch.Tensor  # [D] row of each document's last token
    labels: torch.Tensor  # [D] float32: relevance, or the number of a class
    scores: torch.Tensor  # [D] float32: a teacher's, NaN where there is none
    predicting: torch.Tensor  # [A] rows whose next token is part of an answer; empty for a reranker
    predicted: torch.Tensor  # [A] that next token's id
    group: torch.Tensor  # [D] which group of the global batch a document belongs to
    document: torch.Tensor  # [D] which document of its row it is; segments of one video have the same
    pixel_values: torch.Tensor | None  # [patches, 3 * 2 * patch * patch], each distinct image or video once
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
    groups: Sequence[Encoded],
    units: Sequence[Unit],
    pixels: Mapping[MediaKey, np.ndarray],
    *,
    padded: bool,
    dtype: torch.dtype = torch.float32,
) -> MicroBatch:
    """Pack units into one micro-batch; `pixels` holds their images' patch rows, which become `dtype`, the tower's: two
    steps of them wait in memory. `padded` also lays out the CPU kernel's segments. An empty micro-batch holds one token
    and no document."""
    builder = _Builder()
    for unit in units:
        builder.add(groups[unit.index], unit)
    return builder.build(pixels, padded=padded, dtype=dtype)


class _Builder:
    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.queries: list[tuple[int, int]] = []  # segment: its rows
        self.prefixes: list[tuple[int, int]] = []  # segment: rows before its own that it also attends to
        self.last: list[int] = []
        self.labels: list[float] = []
        self.scores: list[float] = []
        self.predicting: list[np.ndarray] = []
        self.predicted: list[np.ndarray] = []
        self.group: list[int] = []
        self.document: list[int] = []
        self.visual: list[tuple[int, MediaSlot]] = []  # (row, image)
        self.size = 0

    def add(self, group: Encoded, unit: Unit) -> None:
        prefix = (self.size, self.size)
        if group.prefix:
            first = group.prompts[unit.documents[0]]
            prefix = self._segment(first, 0, group.prefix, (self.size, self.size))
        for d in unit.documents:
            prompt = group.prompts[d]
            self._segment(prompt, group.prefix, len(prompt), prefix)
            self.last.append(self.size - 1)
            self.labels.append(group.labels[d])
            self.scores.append(math.nan if group.scores is None else group.scores[d])
            self.group.append(unit.index)
            parts = getattr(group.row, "parts", None)
            self.document.append(d if parts is None else parts[d])

    def _segment(self, prompt: Any, begin: int, end: int, prefix: tuple[int, int]) -> tuple[int, int]:
        rows = (self.size, self.size + end - begin)
        self.ids.append(prompt.ids[begin:end])
        if prompt.answer is not None:
            first = max(begin, 1)  # nothing predicts the very first token
            answers = np.nonzero(prompt.answer[first:end])[0] + first
            self.predicting.append(answers - 1 - begin + rows[0])
            self.predicted.append(prompt.ids[answers])
        self.positions.append(prompt.positions[:, begin:end])
        self.visual += [(rows[0] + s.start - begin, s) for s in prompt.media if begin <= s.start < end]
        self.queries.append(rows)
        self.prefixes.append(prefix)
        self.size = rows[1]
        return rows

    def build(self, pixels: Mapping[MediaKey, np.ndarray], *, padded: bool, dtype: torch.dtype) -> MicroBatch:
        if not self.ids:
            self.ids, self.positions = [np.zeros(1, np.int64)], [np.zeros((3, 1), np.int64)]
            self.queries, self.prefixes = [(0, 1)], [(0, 0)]
        return MicroBatch(
            input_ids=torch.from_numpy(np.concatenate(self.ids)),
            position_ids=torch.from_numpy(np.concatenate(self.positions, axis=1)),
            layout=make_layout(self.queries, self.prefixes, padded=padded),
            last=torch.tensor(self.last, dtype=torch.int64),
            labels=torch.tensor(self.labels, dtype=torch.float32),
            scores=torch.tensor(self.scores, dtype=torch.float32),
            predicting=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *self.predicting])),
            predicted=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *self.predicted])),
            group=torch.tensor(self.group, dtype=torch.int64),
            document=torch.tensor(self.document, dtype=torch.int64),
            **self._images(pixels, dtype),
        )

    def _images(self, pixels: Mapping[MediaKey, np.ndarray], dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
        if not self.visual:
            return dict.fromkeys(("pixel_values", "grid_thw", "visual_rows", "visual_source"))
        distinct = list({slot.key: slot for _, slot in self.visual}.values())
        starts = np.cumsum([0, *(slot.features for slot in distinct)])
        source = {slot.key: int(start) for slot, start in zip(distinct, starts, strict=False)}
        rows = [np.arange(row, row + s.tokens) for row, s in self.visual]
        origin = [np.arange(s.tokens) + source[s.key] + s.offset for _, s in self.visual]
        return {
            "pixel_values": torch.from_numpy(np.concatenate([pixels[slot.key] for slot in distinct])).to(dtype),
            "grid_thw": torch.tensor([slot.grid for slot in distinct]),
            "visual_rows": torch.from_numpy(np.concatenate(rows)),
            "visual_source": torch.from_numpy(np.concatenate(origin)),
        }
