"""Reranker groups as token ids, positions and media slots; lengths are exact before any image is decoded.

Shapes: L tokens of one prompt, P of the group's shared prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from launcher.families import family_of, instruction_of
from launcher.spec import CostModel, RunPlan
from launcher.training.jsonl import RowError
from launcher.training.media import media_rule
from launcher.training.outlines import Outline, make_outline
from launcher.training.pieces import MediaSlot, PieceEncoder, Prompt
from launcher.training.prompts import reranker_prompt
from launcher.training.rows import Group, Image, Row, Video
from launcher.training.segments import with_segments

PATCHES = 4  # that merge into one visual token, in all families


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row as prompts (a group: one a document; a chat: one); all agree on the first `prefix` tokens."""

    row: Row
    prompts: tuple[Prompt, ...]
    prefix: int
    labels: tuple[float, ...]  # one a prompt: relevance, or the number of a class
    scores: tuple[float, ...] | None = None  # a teacher's, one a prompt

    @property
    def tokens(self) -> int:
        """Tokens computed for the group: the prefix once, then each document's own."""
        return self.prefix + sum(len(p) - self.prefix for p in self.prompts)

    def outline(self, model: CostModel) -> Outline:
        """What dividing a batch needs to know of it."""
        # The tower attends within one image, or within one temporal patch of a video.
        patches = [(slot.grid[0], slot.features * PATCHES) for slot in self.unique_media()]
        visual = sum(model.patch * n + model.patch_pair * n * n / times for times, n in patches)
        return make_outline(self.prefix, tuple(len(prompt) for prompt in self.prompts), visual, model)

    def unique_media(self) -> list[MediaSlot]:
        """Each distinct image or video once: repeats inside the group are encoded once."""
        return list({slot.key: slot for prompt in self.prompts for slot in prompt.media}.values())


class Encoder:
    """Turns groups into token ids for one tokenizer and one resize rule."""

    def __init__(
        self,
        pieces: PieceEncoder,
        *,
        instruction: str,
        style: str = "vl",
        share_prefix: bool = True,
        segment_s: float | None = None,
    ) -> None:
        """`style` is that of the prompt (prompts.STYLES); `segment_s` cuts videos of documents into segments of so many
        seconds, each a document of its own."""
        self.pieces = pieces
        self.instruction, self.style = instruction, style
        self.share_prefix = share_prefix
        self.segment_s = segment_s

    def encode(self, group: Group) -> Encoded:
        """Tokenise every prompt of a group whole, then find what they share.

        Raises MediaError, or RowError when a prompt stays above the encoder's length with its document's text cut away,
        or when cutting leaves nothing that tells a positive from a negative.
        """
        if self.segment_s is not None and self.pieces.rule is not None:
            group = with_segments(group, self.segment_s, self.pieces.rule.video)
        instruction = group.instruction or self.instruction
        query_media = sum(isinstance(part, Image | Video) for part in group.query)
        try:
            every = (reranker_prompt(instruction, group.query, d, self.style) for d in group.documents)
            prompts = tuple(self.pieces.prompt(self.pieces.parts(p, query_media=query_media)) for p in every)
        except RowError as error:
            raise RowError(f"{group.where}: row {group.id}: {error}") from None
        if self._contradicts(prompts, group.labels):
            raise RowError(
                f"{group.where}: row {group.id}: a positive and a negative read the same once they are cut to "
                f"dataset.max_length={self.pieces.max_length}; raise it, or shorten the query"
            )
        prefix = shared_prefix(prompts) if self.share_prefix else 0
        return Encoded(row=group, prompts=prompts, prefix=prefix, labels=group.labels, scores=group.scores)

    def _contradicts(self, prompts: tuple[Prompt, ...], labels: tuple[float, ...]) -> bool:
        """Whether documents of both labels were cut (their prompts are full) to the same tokens."""
        full = [(label, (p.ids.tobytes(), p.media)) for label, p in zip(labels, prompts, strict=True)
                if len(p) == self.pieces.max_length]  # fmt: skip
        return bool({key for label, key in full if label} & {key for label, key in full if not label})


class RowEncoder(Protocol):
    """What turns rows of a task into prompts."""

    def encode(self, row: Any, /) -> Encoded:
        """The prompts of a row; raises RowError or MediaError for one that cannot be used."""


def make_encoder(plan: RunPlan, processor: Any) -> RowEncoder:
    """The encoder of a plan's task, lengths and resize rule."""
    from launcher.training.chats import ANSWER_TOKENS, ChatEncoder  # which builds on this module

    data, family, task = plan.config.dataset, family_of(plan.config.model, plan.arch), plan.config.task.name
    groups = Encoder(
        make_pieces(plan, processor, room=ANSWER_TOKENS if task == "sft" else 0),
        instruction=instruction_of(plan),
        style=family.prompt,
        # A state that runs along the sequence cannot begin where the prefix ended.
        share_prefix=plan.config.attention.shared_prefix and not family.recurrent,
        segment_s=data.video.segment_s if family.sees else None,
    )
    return groups if task == "rerank" else ChatEncoder(plan, processor, make_pieces(plan, processor), groups.encode)


def make_pieces(plan: RunPlan, processor: Any, *, room: int = 0) -> PieceEncoder:
    """What turns the pieces of any task's prompt into tokens, as a plan's data set and model ask; `room` tokens of
    dataset.max_length are left free."""
    data = plan.config.dataset
    return PieceEncoder(
        getattr(processor, "tokenizer", processor),
        media_rule(plan, processor),
        max_length=data.max_length - room,
        shrink=data.over_long == "shrink",
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
        for i, slot in enumerate(first.media):
            if i >= len(other.media) or slot != other.media[i]:
                limit = min(limit, slot.start)
                break
    for slot in first.media:
        if slot.start < limit < slot.start + slot.tokens:
            limit = slot.start
    return limit
