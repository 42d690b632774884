"""The demo's rows as files, so that a run scores a few of its held-out groups instead of all 256."""

from __future__ import annotations

import io
import json
from pathlib import Path

import PIL.Image

from launcher.training.digits import read_digits

HELD_OUT = 32


def write_digits(folder: Path, rows: int) -> list[str]:
    """Write so many training rows and HELD_OUT others; `data_words` of the folder."""
    folder.mkdir(parents=True)
    for split, count in (("train", rows), ("eval", HELD_OUT)):
        lines = []
        for group in read_digits(split, seed=42)[:count]:
            names = [f"{group.id}-{number}.png" for number in range(len(group.documents))]
            for name, (image,) in zip(names, group.documents, strict=True):
                PIL.Image.open(io.BytesIO(image.data)).save(folder / name)  # without loss
            positive, *negatives = [{"image": name} for name in names]
            lines.append(json.dumps({"query": group.query[0], "positives": [positive], "negatives": negatives}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return data_words(folder)


def data_words(folder: Path) -> list[str]:
    """What makes the rows in a folder the data of the demo."""
    return ["experiment=digits", "dataset=jsonl", *(f"dataset.{s}={folder}/{s}.jsonl" for s in ("train", "eval"))]
