"""What micro-batches and steps hold: counted once the rows are prepared, else assumed from the configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.estimates import Load
from launcher.planning.shapes import Shape
from launcher.prepared import QUANTITIES
from launcher.spec import RunConfig

# Of rows that nobody has read: a query, its documents, and the part of a prompt that they share.
ASSUMED_DOCUMENTS, ASSUMED_PREFIX = 8, 0.5
# The demo's rows are all alike; a test holds this to what counting them finds.
DIGITS = {
    "kinds": [
        [1, 7, 1, [62, 0, 0, 62, 0, 0, 1953, 0], [10, 4, 16, 72, 1, 0, 675, 256], [70, 28, 112, 504, 7, 0, 4725, 1792]]
    ],
    "densest": [value / 142 for value in (142, 32, 128, 638, 8, 0, 7353, 2048)],
    "most": [[1, 142]],
    "prefix": 62,
    "own": 10,
}
CHANNELS, FRAMES = 3, 2  # of a patch: its numbers are CHANNELS x FRAMES x side x side
ASSUMED_PIXELS = 1280 * 32 * 32  # of an image, where no limit is set


def micro_load(config: RunConfig, shape: Shape, data: Mapping[str, Any], max_tokens: int, *, world: int = 1) -> Load:
    """The fullest micro-batch that a rank can get.

    It is no fuller than the longest rows of a step allow, once they are known. What a token brings along (visual
    tokens, keys, documents) is that of the row that has most of it.
    """
    found = _summary(config, data)
    if found is None:
        row = _assumed_row(config, shape)
        share = {name: row[name] / row["tokens"] for name in QUANTITIES}
        return _load({name: share[name] * max_tokens for name in QUANTITIES})
    tokens = _fullest(config, shape, found, max_tokens, world)
    return _load({name: most * tokens for name, most in zip(QUANTITIES, found["densest"], strict=True)})


def step_load(
    config: RunConfig, shape: Shape, data: Mapping[str, Any], world: int, max_tokens: int
) -> tuple[Load, int, str]:
    """Totals of an average optimizer step over all ranks, micro-steps a rank, and where the lengths come from."""
    found, size = _summary(config, data), config.batch.global_size
    row = _assumed_row(config, shape) if found is None else _mean_row(config, found)
    if shape.family.recurrent and found is not None:
        row = _padded(row, found)
    steps = _micro_steps(row["tokens"], size, world, max_tokens)
    said = _assumption(config, row) if found is None else _counted(found)
    total = {name: row[name] * size for name in QUANTITIES}
    if row["patches"]:
        first = _seen_first(data.get("train") or {}, row["documents"], size / (world * steps))
        total |= {name: total[name] * first for name in ("patches", "patch_pairs")}
    return _load(total), steps, said


def _seen_first(known: Mapping[str, Any], documents: float, rows: float) -> float:
    """Share of the pictures of so many rows, a micro-batch's, that none of its other rows has shown: each distinct one
    passes through the tower once. `documents` a row; of pictures that rows draw alike.

    Example:
        >>> shown = {"rows": 4, "documents": 8, "images": 4, "modality": {"documents": {"image": 8}}}
        >>> _seen_first(shown, 2.0, 2.0)
        0.75
    """
    distinct = known.get("images", 0) + known.get("videos", 0)
    of_all = {"documents": known.get("documents", 0), "queries": known.get("rows", 0), "messages": known.get("rows", 0)}
    shown = 0.0  # of a row
    for what, counts in known.get("modality", {}).items():
        share = sum(n for kind, n in counts.items() if kind != "text") / max(1, of_all[what])
        shown += share * (documents if what == "documents" else 1.0)
    if not distinct or not shown or rows <= 1:
        return 1.0
    shown = min(shown, distinct)
    return float(distinct * (1 - (1 - shown / distinct) ** rows) / (shown * rows))


def _summary(config: RunConfig, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """What counting the training rows has found, None before; lengths of an older version have no such part."""
    found: dict[str, Any] | None = ((data.get("train") or {}).get("lengths") or {}).get("load")
    return DIGITS if found is None and config.dataset.format == "digits" else found


def _counted(found: Mapping[str, Any]) -> str:
    return "lengths of the demo's rows" if found is DIGITS else f"lengths of the {_rows(found):,} training rows"


def _load(values: Mapping[str, float]) -> Load:
    whole = {name: math.ceil(values[name] - 1e-6) for name in QUANTITIES if "pairs" not in name}
    return Load(**whole, pairs=values["pairs"], patch_pairs=values["patch_pairs"])


def _rows(found: Mapping[str, Any]) -> int:
    return sum(int(kind[2]) for kind in found["kinds"])


def _mean_row(config: RunConfig, found: Mapping[str, Any]) -> dict[str, float]:
    """A row as an epoch draws its documents, on average."""
    data, rows = config.dataset, _rows(found)
    total = [0.0] * len(QUANTITIES)
    every, count = [0.0] * len(QUANTITIES), 0.0  # positives of all rows, which random negatives are drawn from
    for positives, negatives, members, base, of_positives, of_negatives in found["kinds"]:
        drawn = _times(of_positives, _share(positives, data.max_positives))
        total = _sum(total, base, drawn, _times(of_negatives, _share(negatives, data.max_negatives)))
        every, count = _sum(every, of_positives), count + positives * members
    if count:
        total = _sum(total, _times(every, data.random_negatives * rows / count))
    return dict(zip(QUANTITIES, _times(total, 1 / rows), strict=True))


def _share(documents: float, most: int | None) -> float:
    return 1.0 if most is None or documents <= most else most / documents


def _sum(*vectors: Sequence[float]) -> list[float]:
    return [math.fsum(values) for values in zip(*vectors, strict=True)]


def _times(vector: Sequence[float], factor: float) -> list[float]:
    return [factor * value for value in vector]


def _padded(row: dict[str, float], found: Mapping[str, Any]) -> dict[str, float]:
    """A row whose documents are all as long as the longest of the mean micro-batch: half way to the longest of all."""
    mean = row["tokens"] / row["documents"]
    longest = (mean + found["own"]) / 2
    return {**row, "tokens": row["documents"] * longest, "pairs": row["documents"] * longest * (longest + 1) / 2}


def _micro_steps(tokens: float, rows: int, world: int, max_tokens: int) -> int:
    """As batching.split_step divides rows of a like length: a row goes into a micro-batch whole if it fits."""
    steps = math.ceil(rows * tokens / (world * max_tokens) - 1e-9)
    together = int(max_tokens // tokens) if tokens else rows
    return max(1, steps, math.ceil(math.ceil(rows / world) / together) if together else 1)


def _fullest(config: RunConfig, shape: Shape, found: Mapping[str, Any], max_tokens: int, world: int) -> float:
    """Tokens of the fullest micro-batch: of the longest rows that may meet in one, at most `max_tokens`.

    A step whose rows are longer has more micro-batches, none of them fuller than its share and one more row.
    """
    data, rows = config.dataset, config.batch.global_size
    steps = _micro_steps(_mean_row(config, found)["tokens"], rows, world, max_tokens)
    together = min(rows, math.ceil(rows / (steps * world)))
    most = _longest(found, together)
    limits = (data.max_positives, data.max_negatives)
    if None not in limits:
        documents = sum(int(n) for n in limits if n is not None) + data.random_negatives
        most = min(most, together * (found["prefix"] + documents * found["own"]))
    elif data.random_negatives:
        most += together * data.random_negatives * found["own"]
    if shape.family.recurrent:
        return float(max_tokens)  # padding fills what rows leave
    return min(float(max_tokens), most)


def _longest(found: Mapping[str, Any], rows: int) -> float:
    """Tokens of so many of the longest rows, at most: between two counts that were kept, as if all were as long."""
    kept: list[list[int]] = found["most"]
    below = [(size, tokens) for size, tokens in kept if size <= rows][-1]
    return below[1] * rows / below[0]


def _assumed_row(config: RunConfig, shape: Shape) -> dict[str, float]:
    """A row whose prompts are as long as dataset.max_length allows; all of it pictures, where there may be some."""
    length, groups = float(config.dataset.max_length), config.task.name == "rerank"
    shares = groups and config.attention.shared_prefix and not shape.family.recurrent
    documents = ASSUMED_DOCUMENTS if groups else 1
    prefix = ASSUMED_PREFIX * length if shares else 0.0
    own = length - prefix
    tokens = prefix + documents * own
    found = {
        "tokens": tokens,
        "visual": 0.0,
        "patches": 0.0,
        "key_rows": prefix + documents * length if shares else 0.0,
        "documents": float(documents),
        "answers": length / 2 if config.task.name == "sft" else 0.0,
        "pairs": prefix * prefix / 2 + documents * own * (prefix + own / 2),
        "patch_pairs": 0.0,
    }
    vision = shape.vision
    if vision is None:
        return found
    merged = vision.merge**2
    side = math.sqrt(vision.patch_values / (CHANNELS * FRAMES))
    pixels = config.dataset.max_pixels or config.model.max_pixels or ASSUMED_PIXELS
    patches = min(pixels / side**2, merged * length)  # of one image
    return {**found, "visual": tokens, "patches": merged * tokens, "patch_pairs": merged * tokens * patches}


def _assumption(config: RunConfig, row: Mapping[str, float]) -> str:
    kind = "a query with 8 documents, " if config.task.name == "rerank" else ""
    pictures = ", all of them of pictures" if row["visual"] else ""
    return (
        f"assumed: {kind}each prompt as long as dataset.max_length={config.dataset.max_length}{pictures} "
        "(python -m launcher check data counts them)"
    )
