"""Divide a global batch over ranks and micro-batches, and pack a micro-batch into tensors.

Shapes: T packed tokens, S attention segments, K key rows of all segments, D documents, V visual tokens,
N distinct images and videos, A answer tokens.

Rows of a micro-batch: the prefixes of all groups, then all documents, those of a group side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from launcher.spec import CostModel
from launcher.training.attention import Layout, make_layout
from launcher.training.encoding import Encoded
from launcher.training.jsonl import RowError
from launcher.training.media import Grid
from launcher.training.outlines import Outline
from launcher.training.patches import Patches, joined
from launcher.training.pieces import MediaKey, MediaSlot, Prompt
from launcher.training.rows import too_large

Part = TypeVar("Part")


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
        made = units_of(index, group.outline(cost), max_tokens, splittable=splittable, padded_rows=padded_rows)
        for unit in made:
            if (needed := unit.beside(0, 0, 0)) > max_tokens:
                raise RowError(too_large(group.row, len(unit.documents), needed, max_tokens))
        units += made
    return units


def units_of(index: int, row: Outline, max_tokens: int, *, splittable: bool, padded_rows: bool) -> list[Unit]:
    """The units of one group as `make_units` makes them; those of a group that fits no micro-batch are too large."""
    share = row.cost / max(row.tokens, 1)
    whole = tuple(range(len(row.lengths)))
    units = []
    for chunk in _chunks(row, max_tokens, padded_rows) if splittable else [whole]:
        tokens = row.prefix + sum(row.lengths[d] - row.prefix for d in chunk)
        longest = max(row.lengths[d] for d in chunk) if padded_rows else 0
        units.append(Unit(index, chunk, tokens, share * tokens, longest))
    return units


def _chunks(row: Outline, max_tokens: int, padded_rows: bool) -> list[tuple[int, ...]]:
    chunks: list[list[int]] = [[]]
    used, longest = row.prefix, 0
    for d, length in enumerate(row.lengths):
        own = length - row.prefix
        longest = max(longest, length) if padded_rows else 0
        if chunks[-1] and max(used + own, (len(chunks[-1]) + 1) * longest) > max_tokens:
            chunks.append([])
            used, longest = row.prefix, length if padded_rows else 0
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
    pixel_values: Patches | torch.Tensor | None  # [patches], each distinct image or video once; a tensor: as numbers
    grid_thw: torch.Tensor | None  # [N, 3]
    visual_rows: torch.Tensor | None  # [V] rows of the packed sequence that are visual tokens, ascending
    visual_source: torch.Tensor | None  # [V] which row of the tower's output goes there

    grids: tuple[Grid, ...] = ()  # those of grid_thw, which are known here without asking a GPU
    # The N media, and whether each is among pixel_values: the features of the others are kept (vision_sight).
    media: Mapping[MediaKey, bool] = field(default_factory=dict)

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on a device; copies out of page-locked memory overlap with computation."""
        moved: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, torch.Tensor | Layout | Patches):
                moved[one.name] = value.to(device, non_blocking=True)
        return replace(self, **moved)

    def pinned(self) -> MicroBatch:
        """The same batch in page-locked memory; needs a GPU."""
        return _pinned(self)

    @property
    def tokens(self) -> int:
        """Packed tokens."""
        return len(self.input_ids)


def _pinned(value: Part) -> Part:
    """A value with every tensor inside it in page-locked memory."""
    new: Any = value
    if isinstance(value, torch.Tensor):
        new = value if value.is_pinned() else value.pin_memory()
    elif isinstance(value, tuple):
        new = tuple(map(_pinned, value))
    elif is_dataclass(value) and not isinstance(value, type):
        new = replace(value, **{one.name: _pinned(getattr(value, one.name)) for one in fields(value) if one.init})
    return new  # type: ignore[no-any-return]


def collate(
    groups: Mapping[int, Encoded] | Sequence[Encoded],
    units: Sequence[Unit],
    pixels: Mapping[MediaKey, Patches],
    *,
    padded: bool,
    pin: bool = False,
) -> MicroBatch:
    """Pack units into one micro-batch; `pixels` holds their images' patch rows. `padded` also lays out the CPU kernel's
    segments, `pin` takes page-locked memory. An empty micro-batch holds one token and no document."""
    packed = [(unit, groups[unit.index]) for unit in units]
    prefixes, documents = _Side(), _Side()
    for unit, group in packed:
        prefixes.add(group.prompts[unit.documents[0]], 0, group.prefix)
    documents.size = prefixes.size
    for unit, group in packed:
        for d in unit.documents:
            documents.add(group.prompts[d], group.prefix, len(group.prompts[d]))
    batch = _build(packed, prefixes, documents, pixels, padded=padded, pin=pin)
    return batch.pinned() if pin else batch


@dataclass
class _Side:
    """Segments one behind the other: all prefixes of a micro-batch, or all of its documents."""

    size: int = 0  # the row behind the last
    rows: list[tuple[int, int]] = field(default_factory=list)  # first and last + 1 of each segment; some are empty
    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    predicting: list[np.ndarray] = field(default_factory=list)
    predicted: list[np.ndarray] = field(default_factory=list)
    visual: list[tuple[int, MediaSlot]] = field(default_factory=list)  # (row, image)

    def add(self, prompt: Prompt, begin: int, end: int) -> None:
        """A prompt's tokens begin .. end - 1 as a segment."""
        first = self.size
        self.size += end - begin
        self.rows.append((first, self.size))
        if begin == end:
            return
        self.ids.append(prompt.ids[begin:end])
        self.positions.append(prompt.positions[:, begin:end])
        self.visual += [(first + s.start - begin, s) for s in prompt.media if begin <= s.start < end]
        if prompt.answer is not None:
            answers = answer_tokens(prompt, begin, end)
            self.predicting.append(answers - 1 - begin + first)
            self.predicted.append(prompt.ids[answers])


def answer_tokens(prompt: Prompt, begin: int, end: int) -> np.ndarray:
    """Which tokens of a prompt's part the loss predicts; nothing predicts the very first one."""
    if prompt.answer is None:
        return np.zeros(0, np.int64)
    first = max(begin, 1)
    return np.nonzero(prompt.answer[first:end])[0] + first


def _build(
    packed: Sequence[tuple[Unit, Encoded]],
    prefixes: _Side,
    documents: _Side,
    pixels: Mapping[MediaKey, Patches],
    *,
    padded: bool,
    pin: bool,
) -> MicroBatch:
    chosen = [(unit, group, d) for unit, group in packed for d in unit.documents]
    ids = [*prefixes.ids, *documents.ids] or [np.zeros(1, np.int64)]
    positions = [*prefixes.positions, *documents.positions] or [np.zeros((3, 1), np.int64)]
    scores = [math.nan if group.scores is None else group.scores[d] for _, group, d in chosen]
    none = np.zeros(0, np.int64)
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        position_ids=torch.from_numpy(np.concatenate(positions, axis=1)),
        layout=_layout([len(unit.documents) for unit, _ in packed], prefixes, documents, padded=padded),
        last=torch.tensor([end - 1 for _, end in documents.rows], dtype=torch.int64),
        labels=torch.tensor([group.labels[d] for _, group, d in chosen], dtype=torch.float32),
        scores=torch.tensor(scores, dtype=torch.float32),
        predicting=torch.from_numpy(np.concatenate([none, *prefixes.predicting, *documents.predicting])),
        predicted=torch.from_numpy(np.concatenate([none, *prefixes.predicted, *documents.predicted])),
        group=torch.tensor([unit.index for unit, _, _ in chosen], dtype=torch.int64),
        document=torch.tensor([_document(group, d) for _, group, d in chosen], dtype=torch.int64),
        **_images([*prefixes.visual, *documents.visual], pixels, pin=pin),
    )


def _document(group: Encoded, d: int) -> int:
    """Which document of its row a prompt is of."""
    parts = getattr(group.row, "parts", None)
    return d if parts is None else int(parts[d])


def _layout(counts: Sequence[int], prefixes: _Side, documents: _Side, *, padded: bool) -> Layout:
    """Each prefix is a segment that sees itself, each document one that sees its group's prefix besides."""
    before = [rows for rows, count in zip(prefixes.rows, counts, strict=True) for _ in range(count)]
    own = [rows for rows in prefixes.rows if rows[0] < rows[1]]
    queries = [*own, *documents.rows] or [(0, 1)]
    seen = [*((first, first) for first, _ in own), *before] or [(0, 0)]
    return make_layout(queries, seen, padded=padded)


def _images(
    visual: Sequence[tuple[int, MediaSlot]], pixels: Mapping[MediaKey, Patches], *, pin: bool
) -> dict[str, Any]:
    if not visual:
        return dict.fromkeys(("pixel_values", "grid_thw", "visual_rows", "visual_source"))
    distinct = list({slot.key: slot for _, slot in visual}.values())
    starts = np.cumsum([0, *(slot.features for slot in distinct)])
    source = {slot.key: int(start) for slot, start in zip(distinct, starts, strict=False)}
    rows = [np.arange(row, row + s.tokens) for row, s in visual]
    origin = [np.arange(s.tokens) + source[s.key] + s.offset for _, s in visual]
    decoded = [pixels[slot.key] for slot in distinct if slot.key in pixels]
    return {
        "pixel_values": joined(decoded, pin=pin) if decoded else None,
        "grid_thw": torch.tensor([slot.grid for slot in distinct]),
        "visual_rows": torch.from_numpy(np.concatenate(rows)),
        "visual_source": torch.from_numpy(np.concatenate(origin)),
        "grids": tuple(slot.grid for slot in distinct),
        "media": {slot.key: slot.key in pixels for slot in distinct},
    }
