"""Pieces of a prompt as token ids, media slots and positions, held to a length: what every task's encoder builds on.

Shapes: L tokens of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from launcher.training.jsonl import RowError
from launcher.training.media import Grid, MediaRule
from launcher.training.prompts import Piece, Special, Text
from launcher.training.rows import Image, Video
from launcher.training.video import Clip

TEXTS = 2048  # whose tokens are kept, as a query comes with each of its documents; a long one takes 100 kB

MediaKey = tuple[Image | Clip, Grid]  # what makes two pictures (or films) one


@dataclass(frozen=True, slots=True)
class MediaSlot:
    """The place in a prompt of an image, or of some frames of a video: `tokens` merged patches from token `start` on.

    `grid` is that of the whole medium, which goes through the vision tower once; the slot holds its merged
    patches from number `offset` on.
    """

    start: int
    tokens: int
    media: Image | Clip
    grid: Grid
    offset: int = 0
    total: int | None = None  # merged patches of the whole medium; None: as many as the slot's
    interval: float = 1.0  # position ids from one temporal patch to the next

    @property
    def key(self) -> MediaKey:
        """Equal for media that give equal pixels."""
        return self.media, self.grid

    @property
    def features(self) -> int:
        """Rows that the whole medium takes in the tower's output."""
        return self.tokens if self.total is None else self.total


@dataclass(frozen=True, slots=True)
class Prompt:
    """One whole prompt, tokenised once."""

    ids: np.ndarray  # [L] int64
    positions: np.ndarray  # [3, L] int64, M-RoPE
    media: tuple[MediaSlot, ...]
    answer: np.ndarray | None = None  # [L] bool: tokens that a chat's loss is on; None for a reranker's prompt

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Part:
    """One piece as tokens; the slots' starts count from the part's first token."""

    ids: tuple[int, ...]
    slots: tuple[MediaSlot, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


class PieceEncoder:
    """Turns the pieces of one prompt into parts that fit `max_length`, and parts into a prompt."""

    def __init__(self, tokenizer: Any, rule: MediaRule | None, *, max_length: int, shrink: bool = False) -> None:
        """`rule` is None for a model that reads text only; `shrink` scales images down where cutting text isn't
        enough."""
        self.tokenizer, self.rule = tokenizer, rule
        self.max_length, self.shrink = max_length, shrink
        self.cuttable = "a document's text"  # what `Text.trim` marks, in words
        self._special = lru_cache(maxsize=None)(self._special_id)
        self._text = lru_cache(maxsize=TEXTS)(self._text_ids)

    def parts(self, pieces: Sequence[Piece], *, query_media: int = 0) -> list[Part]:
        """Each piece as tokens, all together at most `max_length`; only the text that `Text.trim` marks is cut, from
        its end, and if there is no image besides, one token of it stays.

        With `shrink` the images and videos are scaled down, to their min_pixels at the least: all but the first
        `query_media` of them first. Raises RowError without the row's name, or MediaError.
        """
        parts = [self.part(piece) for piece in pieces]
        if length(parts) <= self.max_length:
            return parts
        media = [i for i, piece in enumerate(pieces) if isinstance(piece, Image | Video)]
        spare = [self._spare(piece) for piece in pieces]
        can_go = max(0, sum(spare) - (len(media) == query_media))
        if self.shrink and length(parts) - can_go > self.max_length:
            for several in (media[query_media:], media[:query_media]):
                parts = self._shrunk(pieces, parts, several, self.max_length + can_go)
        over = length(parts) - self.max_length
        if over > can_go:
            raise RowError(self._too_long(length(parts), can_go, bool(media)))
        for i in reversed(range(len(parts))):
            cut = max(0, min(over, spare[i]))
            parts[i] = Part(parts[i].ids[: len(parts[i]) - cut]) if cut else parts[i]
            over -= cut
        return parts

    def part(self, piece: Piece, scale: float = 1.0) -> Part:
        """One piece as tokens; `scale` is the part of an image's area to keep. Raises RowError or MediaError."""
        if isinstance(piece, Special):
            return Part((self._special(piece.text),))
        if isinstance(piece, Text):
            return Part(self._text(piece.text))
        if self.rule is None:
            raise RowError(f"{piece}: this model reads text only")
        return self._image(piece, scale) if isinstance(piece, Image) else self._video(piece, scale)

    def prompt(self, parts: Sequence[Part]) -> Prompt:
        """Parts joined, with positions."""
        ids = np.concatenate([np.asarray(part.ids, dtype=np.int64) for part in parts])
        slots, start = [], 0
        for part in parts:
            slots += [replace(slot, start=start + slot.start) for slot in part.slots]
            start += len(part)
        merge_size = 1 if self.rule is None else self.rule.merge_size
        return Prompt(ids, rope_positions(len(ids), slots, merge_size), tuple(slots))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """(first character, character after the last) of each token of a text."""
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        return list(encoded.offset_mapping)

    def _image(self, image: Image, scale: float) -> Part:
        assert self.rule is not None
        grid = self.rule.image(image, scale)
        tokens = self._features(grid)
        return Part(self._between("<|image_pad|>", tokens), (MediaSlot(1, tokens, image, grid),))

    def _video(self, video: Video, scale: float) -> Part:
        """As the family's own processor writes a video between the template's vision_start and vision_end."""
        assert self.rule is not None
        clip, grid = self.rule.clip(video, scale)
        total = self._features(grid)
        if not self.rule.timestamps:
            slot = MediaSlot(1, total, clip, grid, interval=self.rule.interval(clip))
            return Part(self._between("<|video_pad|>", total), (slot,))
        ids, slots, tokens = [self._special("<|vision_start|>")], [], total // grid[0]
        for i, seconds in enumerate(clip.times):
            ids += self._text(f"<{seconds:.1f} seconds>")
            slots.append(MediaSlot(len(ids) + 1, tokens, clip, grid, offset=i * tokens, total=total))
            ids += self._between("<|video_pad|>", tokens)
        return Part((*ids, self._special("<|vision_end|>")), tuple(slots))

    def _between(self, pad: str, tokens: int) -> tuple[int, ...]:
        pads = (self._special(pad),) * tokens
        return (self._special("<|vision_start|>"), *pads, self._special("<|vision_end|>"))

    def _features(self, grid: Grid) -> int:
        assert self.rule is not None
        return grid[0] * grid[1] * grid[2] // self.rule.merge_size**2

    def _spare(self, piece: Piece) -> int:
        """Tokens at a text's end that may be cut: those that begin inside what `trim` marks."""
        if not isinstance(piece, Text) or not piece.trim:
            return 0
        kept = len(piece.text) - piece.trim
        return sum(begin >= kept for begin, _ in self.offsets(piece.text))

    def _shrunk(self, pieces: Sequence[Piece], parts: list[Part], media: list[int], room: int) -> list[Part]:
        """`parts` with the given media scaled to one share of their area, the largest with which all fit `room`."""
        if not media or length(parts) <= room:
            return parts

        def scaled(thousandths: float) -> list[Part]:
            smaller = {i: self.part(pieces[i], thousandths / 1000) for i in media}
            return [smaller.get(i, part) for i, part in enumerate(parts)]

        best, low, high = scaled(1e-6), 0, 1000  # the first are the smallest that min_pixels allows
        while high - low > 1 and length(best) <= room:
            middle = (low + high) // 2
            tried = scaled(middle)
            if length(tried) <= room:
                best, low = tried, middle
            else:
                high = middle
        return best

    def _too_long(self, tokens: int, can_go: int, media: bool) -> str:
        text = f"a prompt has {tokens} tokens and dataset.max_length={self.max_length}; only the end of {self.cuttable}"
        text += f" can be cut, and it is too short ({can_go} tokens)"
        if media:
            text += "; its images are as small as min_pixels allows" if self.shrink else ""
            text += "" if self.shrink else "; dataset.over_long=shrink scales images down"
        return text

    def _special_id(self, text: str) -> int:
        index = self.tokenizer.convert_tokens_to_ids(text)
        assert isinstance(index, int), text
        return index

    def _text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


def length(parts: Sequence[Part]) -> int:
    """Tokens of all parts."""
    return sum(len(part) for part in parts)


def rope_positions(length: int, slots: Sequence[MediaSlot], merge_size: int) -> np.ndarray:
    """M-RoPE positions [3, length] (time, height, width) of a prompt with images and videos.

    Text advances all three by one. A slot takes its grid's offsets, in time `interval` a temporal patch, and then
    advances by its longer side. Equal to get_rope_index of transformers' Qwen3-VL and Qwen2.5-VL, to which a test
    compares.
    """
    positions = np.empty((3, length), dtype=np.int64)
    at, current = 0, 0
    for slot in slots:
        text = slot.start - at
        positions[:, at : slot.start] = np.arange(text) + current
        current += text
        rows, columns = slot.grid[1] // merge_size, slot.grid[2] // merge_size
        times = slot.tokens // (rows * columns)
        # float32 and then cut off, as there: 2 * 0.7 * 5 may be 6.99
        offsets = (np.arange(times, dtype=np.float32) * np.float32(slot.interval)).astype(np.int64)
        end = slot.start + slot.tokens
        positions[0, slot.start : end] = current + np.repeat(offsets, rows * columns)
        positions[1, slot.start : end] = current + np.tile(np.repeat(np.arange(rows), columns), times)
        positions[2, slot.start : end] = current + np.tile(np.arange(columns), rows * times)
        current += max(rows, columns)
        at = end
    positions[:, at:] = np.arange(length - at) + current
    return positions
