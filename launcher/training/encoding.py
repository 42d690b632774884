"""Reranker groups as token ids, positions and image slots; lengths are exact before any image is decoded.

Shapes: L tokens of one prompt, P of the group's shared prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from launcher.spec import CostModel, RunPlan
from launcher.training.formats import Group, Image
from launcher.training.images import image_size, smart_resize
from launcher.training.jsonl import RowError
from launcher.training.prompts import Piece, Special, Text, reranker_prompt

Grid = tuple[int, int, int]  # patches: (1, height, width)
ImageKey = tuple[Image, Grid]  # what makes two images one


@dataclass(frozen=True, slots=True)
class ImageSlot:
    """An image's place in a prompt: `tokens` merged patches from token `start` on."""

    start: int
    tokens: int
    image: Image
    grid: Grid

    @property
    def key(self) -> ImageKey:
        """Equal for images that give equal pixels."""
        return self.image, self.grid


@dataclass(frozen=True, slots=True)
class Prompt:
    """One whole prompt, tokenised once."""

    ids: np.ndarray  # [L] int64
    positions: np.ndarray  # [3, L] int64, M-RoPE
    images: tuple[ImageSlot, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A query with its documents; all prompts agree on the first `prefix` tokens."""

    group: Group
    prompts: tuple[Prompt, ...]
    prefix: int

    @property
    def tokens(self) -> int:
        """Tokens computed for the group: the prefix once, then each document's own."""
        return self.prefix + sum(len(p) - self.prefix for p in self.prompts)

    def cost(self, model: CostModel, patch_factor: int = 4) -> float:
        """Predicted forward FLOPs; `patch_factor` patches merge into one visual token."""
        pairs = self.prefix**2 / 2
        for prompt in self.prompts:
            own = len(prompt) - self.prefix
            pairs += own * (self.prefix + own / 2)
        patches = [slot.tokens * patch_factor for slot in self.unique_images()]
        visual = sum(model.patch * n + model.patch_pair * n * n for n in patches)
        return model.token * self.tokens + model.token_pair * pairs + visual

    def unique_images(self) -> list[ImageSlot]:
        """Each distinct image once: repeats inside the group are encoded once."""
        return list({slot.key: slot for prompt in self.prompts for slot in prompt.images}.values())


class Encoder:
    """Turns groups into token ids for one tokenizer and one resize rule."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        instruction: str,
        max_length: int,
        patch_size: int,
        merge_size: int,
        min_pixels: int,
        max_pixels: int,
        share_prefix: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.instruction = instruction
        self.max_length = max_length
        self.patch_size, self.merge_size = patch_size, merge_size
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.share_prefix = share_prefix
        self._special = lru_cache(maxsize=None)(self._special_id)
        self._text = lru_cache(maxsize=65536)(self._text_ids)

    def encode(self, group: Group) -> EncodedGroup:
        """Tokenise every prompt of a group whole, then find what they share.

        Raises RowError when a prompt stays above `max_length` with its document's text cut away, or when cutting
        leaves nothing that tells a positive from a negative.
        """
        instruction = group.instruction or self.instruction
        prompts = tuple(self._prompt(reranker_prompt(instruction, group.query, d), group) for d in group.documents)
        if self._contradicts(prompts, group.labels):
            raise RowError(
                f"{group.where}: row {group.id}: a positive and a negative read the same once they are cut to "
                f"dataset.max_length={self.max_length}; raise it, or shorten the query"
            )
        prefix = shared_prefix(prompts) if self.share_prefix else 0
        return EncodedGroup(group=group, prompts=prompts, prefix=prefix)

    def _contradicts(self, prompts: tuple[Prompt, ...], labels: tuple[float, ...]) -> bool:
        """Whether documents of both labels were cut (their prompts are full) to the same tokens."""
        full = [(label, (p.ids.tobytes(), p.images)) for label, p in zip(labels, prompts, strict=True)
                if len(p) == self.max_length]  # fmt: skip
        return bool({key for label, key in full if label} & {key for label, key in full if not label})

    def _prompt(self, pieces: list[Piece], group: Group) -> Prompt:
        parts = [self._piece(piece) for piece in pieces]
        over = sum(len(ids) for ids, _ in parts) - self.max_length
        if over > 0:
            parts = self._shortened(pieces, parts, over, group)
        ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in parts])
        slots, start = [], 0
        for (part, grid), piece in zip(parts, pieces, strict=True):
            if isinstance(piece, Image):  # between vision_start and vision_end
                slots.append(ImageSlot(start + 1, len(part) - 2, piece, grid))
            start += len(part)
        return Prompt(ids, rope_positions(len(ids), slots, self.merge_size), tuple(slots))

    def _piece(self, piece: Piece) -> tuple[tuple[int, ...], Any]:
        if isinstance(piece, Special):
            return (self._special(piece.text),), None
        if isinstance(piece, Text):
            return self._text(piece.text), None
        width, height = image_size(piece)
        low, high = piece.min_pixels or self.min_pixels, piece.max_pixels or self.max_pixels
        rows, columns = smart_resize(height, width, self.patch_size * self.merge_size, low, high)
        grid = (1, rows // self.patch_size, columns // self.patch_size)
        pads = (self._special("<|image_pad|>"),) * (grid[1] * grid[2] // self.merge_size**2)
        return (self._special("<|vision_start|>"), *pads, self._special("<|vision_end|>")), grid

    def _shortened(self, pieces: list[Piece], parts: list[Any], over: int, group: Group) -> list[Any]:
        """Cut the end of the document's text; template, query and images stay whole."""
        index = len(pieces) - 5  # the document's last piece; <|im_end|> newline <|im_start|> assistant follow it
        piece = pieces[index]
        if isinstance(piece, Text) and piece.trim:
            kept = len(piece.text) - piece.trim
            offsets = self._offsets(piece.text)
            first = next((i for i, (begin, _) in enumerate(offsets) if begin >= kept), len(offsets))
            if len(offsets) - first > over:  # at least one token of the document stays
                parts = list(parts)
                parts[index] = (parts[index][0][:-over], None)
                return parts
        raise RowError(
            f"{group.where}: row {group.id}: a prompt has {over + self.max_length} tokens and dataset.max_length="
            f"{self.max_length}; only the end of a document's text can be cut, and it is too short"
        )

    def _special_id(self, text: str) -> int:
        index = self.tokenizer.convert_tokens_to_ids(text)
        assert isinstance(index, int), text
        return index

    def _text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        return list(encoded.offset_mapping)


def make_encoder(plan: RunPlan, processor: Any) -> Encoder:
    """The encoder of a plan's task, lengths and resize rule."""
    image = processor.image_processor
    return Encoder(
        processor.tokenizer,
        instruction=plan.config.task.instruction,
        max_length=plan.config.dataset.max_length,
        patch_size=image.patch_size,
        merge_size=image.merge_size,
        min_pixels=image.size["shortest_edge"],
        max_pixels=image.size["longest_edge"],
        share_prefix=plan.config.attention.shared_prefix,
    )


def shared_prefix(prompts: tuple[Prompt, ...]) -> int:
    """Tokens all prompts begin with: equal ids and equal images, at least one own token left to each, never
    ending inside an image. 0 for a single prompt: nothing is shared."""
    if len(prompts) < 2:
        return 0
    first = prompts[0]
    limit = min(len(p) for p in prompts) - 1
    for other in prompts[1:]:
        differ = np.nonzero(first.ids[:limit] != other.ids[:limit])[0]
        limit = int(differ[0]) if len(differ) else limit
        for i, slot in enumerate(first.images):
            if i >= len(other.images) or slot != other.images[i]:
                limit = min(limit, slot.start)
                break
    for slot in first.images:
        if slot.start < limit < slot.start + slot.tokens:
            limit = slot.start
    return limit


def rope_positions(length: int, slots: list[ImageSlot], merge_size: int) -> np.ndarray:
    """M-RoPE positions [3, length] (time, height, width) of a prompt with images.

    Text advances all three by one; an image takes its grid's offsets and then advances by its longer side
    (transformers' Qwen3VLModel.get_rope_index, to which a test compares).
    """
    positions = np.empty((3, length), dtype=np.int64)
    at, current = 0, 0
    for slot in slots:
        text = slot.start - at
        positions[:, at : slot.start] = np.arange(text) + current
        current += text
        rows, columns = slot.grid[1] // merge_size, slot.grid[2] // merge_size
        end = slot.start + slot.tokens
        positions[0, slot.start : end] = current
        positions[1, slot.start : end] = current + np.repeat(np.arange(rows), columns)
        positions[2, slot.start : end] = current + np.tile(np.arange(columns), rows)
        current += max(rows, columns)
        at = end
    positions[:, at:] = np.arange(length - at) + current
    return positions
