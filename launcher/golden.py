"""Scores that an export gave when it was written: what its folder, or a server of it, is held to later.

Standard library only: the launching process asks servers, the training plane asks the folder itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.plain import from_data, to_data
from launcher.rundir import read_json, write_json

FILE = "golden.json"
# Of P(yes), by the number format of the weights: other kernels round elsewhere.
TOLERANCES = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 2e-2}
MEANINGFUL = 5.0  # scores should spread over so many tolerances, or a wrong template goes unseen

Item = dict[str, str]  # {"type": "text", "text": ...} | {"type": "image", "image": data URI}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A query and a document with the score they had; `instruction` None means the template's own."""

    query: list[Item]
    document: list[Item]
    instruction: str | None
    logit: float  # z_yes - z_no
    score: float  # P(yes) = sigmoid(logit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """What lies in golden.json."""

    about: str
    precision: str
    tolerance: float  # of a score
    versions: dict[str, str]
    pairs: list[Pair]

    @property
    def spread(self) -> float:
        """Largest score minus smallest."""
        scores = [pair.score for pair in self.pairs]
        return max(scores) - min(scores)


def sigmoid(logit: float) -> float:
    """P(yes) of a score; exact for large ones too.

    Example:
        >>> sigmoid(0.0), sigmoid(-800.0)
        (0.5, 0.0)
    """
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1.0 + math.exp(logit))


def write_golden(folder: Path, golden: Golden) -> None:
    """Put golden.json into an export."""
    write_json(folder / FILE, to_data(golden))


def read_golden(folder: Path) -> Golden:
    """The golden scores of an export; raises ConfigError when there are none."""
    try:
        data: Any = read_json(folder / FILE)
        golden: Golden = from_data(Golden, data)
    except FileNotFoundError:
        text = f"{folder} has no {FILE}: exports of a reranker have one"
        raise ConfigError(Problem(text, tries=("python -m launcher export RUN --out FOLDER",))) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(Problem(f"{folder / FILE} can't be read: {error}")) from None
    return golden


def verdict(golden: Golden, found: Sequence[float | str], tolerance: float) -> tuple[list[str], bool]:
    """Lines to print, and whether every score is within `tolerance`; a text in `found` is why there is no score."""
    lines, worst, good = [f"  {'golden':>8}  {'here':>8}  {'difference':>10}"], 0.0, True
    for pair, score in zip(golden.pairs, found, strict=True):
        if isinstance(score, str):
            good = False
            lines.append(f"  {pair.score:8.4f}  {'-':>8}  {'-':>10}  {_shown(pair)}: {score}")
            continue
        difference = abs(score - pair.score)
        off = not difference <= tolerance  # a NaN is off
        good, worst = good and not off, max(worst, difference)
        lines.append(
            f"  {pair.score:8.4f}  {score:8.4f}  {difference:10.6f}  {_shown(pair)}{'  <- off' if off else ''}"
        )
    outcome = "the scores agree" if good else "the scores do NOT agree"
    lines.append(f"largest difference {worst:.6f}, allowed {tolerance:g}: {outcome}")
    if golden.spread < MEANINGFUL * tolerance:
        text = f"these scores spread over {golden.spread:.4f} only, so that agreeing within {tolerance:g} says little"
        lines.append(f"note: {text}; --tolerance {golden.spread / 100:.1g} says more")
    return lines, good


def _shown(pair: Pair) -> str:
    return f"{_words(pair.query)} / {_words(pair.document)}"


def _words(content: Sequence[Item]) -> str:
    text = " ".join(item["text"] if item["type"] == "text" else f"<{item['type']}>" for item in content) or "(empty)"
    text = " ".join(text.split())
    return text if len(text) <= 32 else f"{text[:31]}…"
