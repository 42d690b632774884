"""The demo's rows: real handwritten digits, ranked for queries such as "the digit seven".

The images come with the package (launcher/data/README.md has their source and licence); held-out groups use
images that no training group holds.
"""

from __future__ import annotations

import random
from pathlib import Path

from launcher.training.rows import Content, Group, Image

DATA = Path(__file__).resolve().parent.parent / "data" / "digits.parquet"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRAIN_GROUPS = 6400  # 400 steps of 16 groups
EVAL_GROUPS = 256
NEGATIVES = 7
SCALE = 8  # 8 x 8 values become 64 x 64 pixels
EVAL_SEED = 0  # held-out groups are the same whatever the run's seed


def read_digits(split: str, *, seed: int, max_rows: int | None = None) -> list[Group]:
    """The groups of "train" (a pure function of `seed`) or "eval" (always the same).

    One positive and seven negatives of seven other digits; queries go round the ten digits.
    """
    images = _images(split)
    count, base = (TRAIN_GROUPS, seed) if split == "train" else (EVAL_GROUPS, EVAL_SEED)
    draw = random.Random(f"digits:{split}:{base}")
    groups = []
    for row in range(count if max_rows is None else min(count, max_rows)):
        digit = row % 10
        others = draw.sample([d for d in range(10) if d != digit], NEGATIVES)
        documents: tuple[Content, ...] = tuple((draw.choice(images[d]),) for d in (digit, *others))
        groups.append(
            Group(
                id=f"{split}-{row}",
                where=f"digits {split}:{row}",
                instruction=None,
                query=(f"the digit {WORDS[digit]}",),
                documents=documents,
                labels=(1.0, *(0.0,) * NEGATIVES),
            )
        )
    return groups


def _images(split: str) -> dict[int, list[Image]]:
    """The split's images by digit."""
    import numpy as np
    import pyarrow.parquet as pq

    table = pq.ParquetFile(DATA).read().combine_chunks()  # read_table would import pandas
    pixels = table["pixels"].combine_chunks().flatten().to_numpy().reshape(-1, 8, 8)
    large = np.kron(pixels.astype(np.uint16) * 255 // 16, np.ones((SCALE, SCALE), dtype=np.uint16)).astype(np.uint8)
    # PGM: a header and the bytes, written and decoded in no time
    header = f"P5 {large.shape[2]} {large.shape[1]} 255\n".encode()
    images: dict[int, list[Image]] = {digit: [] for digit in range(10)}
    for values, digit, own in zip(large, table["label"].to_pylist(), table["split"].to_pylist(), strict=True):
        if own == split:
            images[digit].append(Image(path=None, data=header + values.tobytes()))
    return images
