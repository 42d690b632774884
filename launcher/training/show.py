"""Training rows as the model sees them: `check data --show N`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from launcher.spec import RunPlan
from launcher.streams import printable
from launcher.training.encoding import Encoded, make_encoder
from launcher.training.images import image_size
from launcher.training.media import MediaRule, media_rule
from launcher.training.pieces import MediaSlot, Prompt
from launcher.training.processors import load_processor
from launcher.training.rows import Group, Image, Row

OPEN, CLOSE = "[[", "]]"  # around tokens that the loss is on
SHOWN_PROMPTS = 8  # of a row


def show_rows(plan: RunPlan, rows: Sequence[Row], count: int) -> None:
    """Print the first `count` rows: every prompt with its special tokens, label, token counts and media."""
    processor = load_processor(plan, local_only=True)
    encoder, rule = make_encoder(plan, processor), media_rule(plan, processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    for row in rows[:count]:
        print(printable("\n".join(["", *_shown(encoder.encode(row), tokenizer, rule)])), flush=True)


def _shown(encoded: Encoded, tokenizer: Any, rule: MediaRule | None) -> Iterator[str]:
    row, prompts = encoded.row, encoded.prompts
    shared = f", {encoded.prefix:,} of them shared" if encoded.prefix else ""
    yield f"--- row {row.id}  ({row.where}): {encoded.tokens:,} tokens{shared}"
    for number, prompt in enumerate(prompts[:SHOWN_PROMPTS]):
        yield f"- prompt {number + 1} of {len(prompts)}: {len(prompt):,} tokens, {_target(encoded, number)}"
        first = encoded.prefix if number else 0
        for slot in {slot.key: slot for slot in prompt.media if slot.start >= first}.values():
            yield f"  {_medium(slot, rule)}"
        lead = f"... the shared {first:,} tokens ..." if first else ""
        yield lead + rendered(prompt, tokenizer, first)
    if len(prompts) > SHOWN_PROMPTS:
        yield f"- and {len(prompts) - SHOWN_PROMPTS} more prompts"


def _target(encoded: Encoded, number: int) -> str:
    """What the prompt's output is held to."""
    answer = encoded.prompts[number].answer
    if answer is not None:
        return f"loss on {int(answer.sum()):,} tokens, between {OPEN} and {CLOSE}"
    if isinstance(encoded.row, Group):
        score = "" if encoded.scores is None else f", teacher's score {encoded.scores[number]:g}"
        return f"label {encoded.labels[number]:g}{score}"
    index = encoded.labels[number]  # not a number while the classes are those that all rows will tell
    return f"class {encoded.row.label}" + (f" (row {index:g} of the head)" if np.isfinite(index) else "")


def _medium(slot: MediaSlot, rule: MediaRule | None) -> str:
    assert rule is not None
    high, wide = (side * rule.patch_size for side in slot.grid[1:])
    if isinstance(slot.media, Image):
        width, height = image_size(slot.media)
        return f"{slot.media}: {width} x {height} -> {wide} x {high} pixels, {slot.features:,} tokens"
    times = ", ".join(f"{seconds:.1f}" for seconds in slot.media.times)
    frames = f"{len(slot.media.frames)} frames of {wide} x {high} pixels, {slot.features:,} tokens"
    return f"{slot.media}: {frames}; pairs at {times} s"


def rendered(prompt: Prompt, tokenizer: Any, first: int = 0) -> str:
    """The prompt's text from token `first` on, runs of pads as `<|image_pad|> x 1008`, answers between brackets."""
    answer = np.zeros(len(prompt), bool) if prompt.answer is None else prompt.answer
    marked = list(zip(prompt.ids[first:].tolist(), answer[first:].tolist(), strict=True))
    text = ""
    for trained, run in groupby(marked, key=lambda item: item[1]):
        part = "".join(_text(tokenizer, [token for token, _ in run]))
        text += f"{OPEN}{part}{CLOSE}" if trained else part
    return text


def _text(tokenizer: Any, ids: list[int]) -> Iterator[str]:
    pads = set(tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"]))
    for pad, run in groupby(ids, key=lambda token: token if token in pads else None):
        part = list(run)
        if pad is None:
            yield tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        else:
            yield f"{tokenizer.convert_ids_to_tokens(pad)} x {len(part)}"
