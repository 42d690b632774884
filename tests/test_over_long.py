"""Prompts above dataset.max_length: the document's text is cut, images are shrunk if asked, nothing else is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.training import processors
from launcher.training.encoding import Encoder, make_encoder
from launcher.training.jsonl import RowError
from launcher.training.pieces import Prompt
from launcher.training.prompts import STYLES
from launcher.training.rows import Group, Image, Video
from tests.films import film
from tests.groups import group, picture
from tests.tiny import tiny_plan

LONG = "the river and a red door " * 60


def make(folder: Path, length: int, **dataset: Any) -> Encoder:
    plan = tiny_plan(folder, dataset={"max_length": length, **dataset})
    return make_encoder(plan, processors.load_processor(plan))


def ends_as_the_template(encoder: Encoder, prompt: Prompt, style: str = "vl") -> bool:
    end = "<|im_end|>\n<|im_start|>" + STYLES[style].answer
    ids = encoder.pieces.tokenizer(end, add_special_tokens=False).input_ids
    return prompt.ids[-len(ids) :].tolist() == ids


def whole(folder: Path, row: Group) -> tuple[Prompt, ...]:
    return make(folder, 100_000).encode(row).prompts


@pytest.mark.parametrize(
    "document",
    [
        (LONG,),
        (picture(1), LONG),
        (LONG, picture(1)),  # the image behind the text that is cut (I15)
        (LONG, picture(1), "and then " * 40, picture(2)),  # both texts are cut, the last first
    ],
)
def test_only_the_documents_text_is_cut(tmp_path: Path, document: Any) -> None:
    row = group((picture(3), "what is it"), document, ("other",))
    encoder = make(tmp_path, 150)
    (cut, other), (full, _) = encoder.encode(row).prompts, whole(tmp_path, row)
    assert len(cut) == 150 < len(full)
    assert ends_as_the_template(encoder, cut) and ends_as_the_template(encoder, other)  # R01
    assert [slot.tokens for slot in cut.media] == [slot.tokens for slot in full.media]  # I14
    pad = encoder.pieces.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (cut.ids == pad).sum() == sum(slot.tokens for slot in cut.media)
    first = next(i for i, (a, b) in enumerate(zip(cut.ids, full.ids, strict=False)) if a != b)
    text = encoder.pieces.tokenizer.decode(full.ids[:first].tolist())
    assert text.split("<Document>:")[0].endswith("what is it\n") and "<Document>:" in text


def test_the_text_rerankers_end_stays(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, dataset={"max_length": 120})
    pieces = make_encoder(plan, processors.load_processor(plan)).pieces
    encoder = Encoder(pieces, instruction="i", style="text")
    prompt = encoder.encode(group(("q",), (LONG,), ("b",))).prompts[0]
    assert len(prompt) == 120 and ends_as_the_template(encoder, prompt, "text")


@pytest.mark.parametrize("over_long", ["drop", "shrink"])
def test_a_query_that_leaves_no_room_is_named(tmp_path: Path, over_long: str) -> None:
    row = group((LONG * 3,), ("a",), ("b",), name="q7")
    with pytest.raises(RowError, match="test:1: row q7: a prompt has .* and it is too short") as caught:  # R11
        make(tmp_path, 300, over_long=over_long).encode(row)
    assert "shrink" not in str(caught.value)  # there is no image


@pytest.fixture
def images() -> Group:
    """Large pictures in query and documents: 64 x 64 px are 4 tokens, so these are 64 each."""
    large = [Image(None, picture(n, 256, 256).data, max_pixels=65536) for n in range(4)]
    return group((large[0], "q"), (large[1], large[2]), (large[3], "text"), name="pages")


def tokens(prompt: Prompt) -> list[int]:
    return [slot.tokens for slot in prompt.media]


def test_images_are_shrunk_when_asked(tmp_path: Path, images: Group) -> None:
    full = whole(tmp_path, images)
    assert [tokens(p) for p in full] == [[64, 64, 64], [64, 64]]
    room = len(full[0]) - 50
    with pytest.raises(RowError, match="dataset.over_long=shrink scales images down"):
        make(tmp_path, room).encode(images)
    encoder = make(tmp_path, room, over_long="shrink")
    found = encoder.encode(images).prompts
    # The document's two share the loss, the query's stays, and so does a prompt that fits.
    assert [tokens(p) for p in found] == [[64, 36, 36], [64, 64]]
    assert len(found[0]) <= room and ends_as_the_template(encoder, found[0])
    tight = make(tmp_path, len(full[0]) - 3 * 64 + 20, over_long="shrink").encode(images).prompts
    assert tokens(tight[0]) == [16, 1, 1]  # the document's first, down to min_pixels; then the query's
    with pytest.raises(RowError, match="row pages: .* as small as min_pixels allows"):
        make(tmp_path, len(full[0]) - 3 * 64 + 2, over_long="shrink").encode(images)


def test_text_is_cut_before_images_shrink(tmp_path: Path, images: Group) -> None:
    row = group(images.query, (images.documents[0][0], LONG), ("b",))
    full = whole(tmp_path, row)[0]
    found = make(tmp_path, 300, over_long="shrink").encode(row).prompts[0]
    assert len(found) == 300 < len(full) and tokens(found) == [64, 64]


def test_frames_of_a_video_are_shrunk(tmp_path: Path) -> None:
    video = Video(film(tmp_path / "film.mp4", width=256, height=256).path, max_pixels=65536)
    row = group(("q",), (video, "x"), ("b",))
    full = whole(tmp_path, row)[0]
    found = make(tmp_path, len(full) - 20, over_long="shrink").encode(row).prompts[0]
    assert tokens(full) == [64, 64] and tokens(found) == [49, 49]
    with pytest.raises(RowError, match="row g: .* only the end of a document's text can be cut"):
        make(tmp_path, len(full) - 20).encode(row)
