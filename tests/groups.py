"""Small reranker groups of every kind, for tests of the training plane."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image

from launcher.spec import DatasetConfig, LossConfig, RunConfig, TaskConfig, TrainConfig
from launcher.training.batching import MicroBatch, Unit, collate
from launcher.training.encoding import Encoded
from launcher.training.formats import BadRow, read_split
from launcher.training.pixels import Pixels
from launcher.training.rows import Content, Group, Image


def picture(seed: int, width: int = 64, height: int = 64) -> Image:
    """Random pixels as an encoded PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return Image(None, buffer.getvalue())


def group(query: Content, *documents: Content, name: str = "g") -> Group:
    """A group whose first document is the positive one."""
    labels = (1.0,) + (0.0,) * (len(documents) - 1)
    return Group(name, "test:1", None, query, documents, labels)


GROUPS = {
    "text": [
        # Documents that begin with punctuation join with the template's colon or newline into other tokens.
        group(("what is it",), ("a ring",), (":( no",), ("\n\nline",), (")",), ("a red ring of the door",)),
        group(("why",), ("because",), ("",)),
    ],
    "image query": [group((picture(1), "what?"), ("a red door",), ("a",), ("it is blue",))],
    "image documents": [
        group(("the digit",), (picture(2),), (picture(3, 32, 96), "text"), (picture(2),)),
        group(("the digit",), (picture(2),), (picture(4, 64, 32),)),
    ],
    "mixed": [
        group(("only text",), ("a",), ("b",)),
        group((picture(5), picture(6, 96, 32), "two"), (picture(5), "same"), ("none",), ("text ", picture(7), " last")),
        group(("alone",), (picture(8),)),
    ],
}


def read_groups(
    dataset: DatasetConfig, split: str, *, seed: int, need_negatives: bool = False
) -> tuple[list[Group], list[BadRow]]:
    """The reranker groups of a split and the rows that can't be used; image files are looked up, not opened."""
    loss = LossConfig(name="listwise" if need_negatives else "pointwise")
    config = RunConfig(dataset=dataset, loss=loss, task=TaskConfig(name="rerank"), train=TrainConfig(seed=seed))
    rows, bad = read_split(config, split)
    return [row for row in rows if isinstance(row, Group)], bad


def packed(processor: Any, encoded: Sequence[Encoded], units: Sequence[Unit]) -> MicroBatch:
    """Units of encoded rows as one micro-batch for the CPU's kernel, their pictures read."""
    pixels = Pixels(processor)
    needed = {s.key: pixels.rows(s) for u in units for d in u.documents for s in encoded[u.index].prompts[d].media}
    return collate(encoded, units, needed, padded=True)
