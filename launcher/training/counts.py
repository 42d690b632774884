"""What rows hold beside tokens, counted with them: what the planner's memory and seconds follow from.

Quantities are those of launcher.estimates.Load, in that order. A row is its base (the prefix that its prompts share,
and media that several of them show) and its prompts; which of these an epoch trains on is drawn, so they are apart.

Shapes: N rows, D prompts of all rows, Q quantities.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.prepared import QUANTITIES

if TYPE_CHECKING:
    from launcher.training.encoding import Encoded
    from launcher.training.lengths import Lengths

KINDS = 32  # kinds of rows, by numbers of documents, that a summary tells apart
SMALL = 0.25  # of the mean row: shorter ones are no measure of what a micro-batch may be full of


@dataclass(frozen=True)
class Counts:
    """Media and answers of rows [N] and of their prompts [D]; each distinct medium of a row counts once."""

    base_visual: np.ndarray  # [N] int32: visual tokens of the prefix
    base_patches: np.ndarray  # [N] int32: patches of media that several prompts show
    base_pairs: np.ndarray  # [N] float64: pairs of patches attended in them
    visual: np.ndarray  # [D] int32: visual tokens behind the prefix
    patches: np.ndarray  # [D] int32: patches of media that no other prompt shows
    patch_pairs: np.ndarray  # [D] float64
    answers: np.ndarray  # [D] int32: tokens behind the prefix whose prediction is in the loss


ROW_COUNTS = ("base_visual", "base_patches", "base_pairs")
PROMPT_COUNTS = ("visual", "patches", "patch_pairs", "answers")
_TYPES = {"base_pairs": np.float64, "patch_pairs": np.float64}


def make_counts(rows: list[tuple[float, ...]], prompts: list[tuple[float, ...]]) -> Counts:
    """Counts of what `count_row` gave for every row."""
    columns = {
        **dict(zip(ROW_COUNTS, np.asarray(rows, np.float64).reshape(-1, len(ROW_COUNTS)).T, strict=True)),
        **dict(zip(PROMPT_COUNTS, np.asarray(prompts, np.float64).reshape(-1, len(PROMPT_COUNTS)).T, strict=True)),
    }
    return Counts(**{name: column.astype(_TYPES.get(name, np.int32)) for name, column in columns.items()})


def join_counts(parts: list[Counts]) -> Counts:
    """Counts of consecutive rows as one."""
    names = [field.name for field in fields(Counts)]
    empty = {name: np.zeros(0, _TYPES.get(name, np.int32)) for name in names}
    return Counts(**{name: np.concatenate([empty[name], *(getattr(p, name) for p in parts)]) for name in names})


def count_row(encoded: Encoded) -> tuple[tuple[float, ...], list[tuple[float, ...]]]:
    """ROW_COUNTS of a row, and PROMPT_COUNTS of each of its prompts."""
    prefix, shown = encoded.prefix, dict[Any, int]()
    for prompt in encoded.prompts:
        for key in {slot.key for slot in prompt.media}:
            shown[key] = shown.get(key, 0) + 1
    base, own = (0, 0.0), list[tuple[float, ...]]()
    counted = set[Any]()
    for prompt in encoded.prompts:
        visual, mine = 0, (0, 0.0)
        for slot in prompt.media:
            visual += slot.tokens * (slot.start >= prefix)
            if slot.key in counted:
                continue
            counted.add(slot.key)
            patches = slot.features * 4  # that merge into one visual token, in all families
            more = (patches, patches * patches / slot.grid[0])  # the tower attends within one temporal patch
            if shown[slot.key] > 1:
                base = (base[0] + more[0], base[1] + more[1])
            else:
                mine = (mine[0] + more[0], mine[1] + more[1])
        answers = 0 if prompt.answer is None else int(prompt.answer[max(prefix, 1) :].sum())
        own.append((visual, *mine, answers))
    seen = sum(slot.tokens for slot in encoded.prompts[0].media if slot.start < prefix)
    return (seen, *base), own


def load_summary(lengths: Lengths) -> dict[str, Any]:
    """JSON-ready: what `launcher.planning.load` reads; rows without any length are left out.

    kinds: rows of like numbers of documents: [positives, negatives, rows, sums of the rows' bases, of their positives,
    of their negatives], each sum a list in the order of QUANTITIES. densest: most of each quantity a token in any row.
    most: [n, tokens of the n longest rows together] for powers of two. own, prefix: tokens of the longest.
    """
    used = lengths.count > 0
    base, own = _base(lengths), _own(lengths)
    sums = np.concatenate([np.zeros((1, len(QUANTITIES))), np.cumsum(own, axis=0)])
    middle = lengths.starts[:-1] + lengths.positives
    positive = (sums[middle] - sums[lengths.starts[:-1]])[used]
    negative = (sums[lengths.starts[1:]] - sums[middle])[used]
    base, documents = base[used], np.stack([lengths.positives, lengths.count - lengths.positives], axis=1)[used]
    whole = base + positive + negative
    tokens = whole[:, 0]
    telling = tokens >= SMALL * tokens.mean()
    longest = np.sort(tokens)[::-1]
    sizes = [1 << power for power in range(len(tokens).bit_length())]
    kinds = []
    for members in _kinds(documents):
        positives, negatives = documents[members].mean(axis=0).tolist()
        parts = [part[members].sum(axis=0).tolist() for part in (base, positive, negative)]
        kinds.append([positives, negatives, len(members), *parts])
    return {
        "kinds": kinds,
        "densest": (whole[telling] / tokens[telling, None]).max(axis=0).tolist(),
        "most": [[size, int(longest[:size].sum())] for size in sizes],
        "prefix": int(lengths.prefix[used].max()),
        "own": int(own[:, 0].max()),
    }


def _base(lengths: Lengths) -> np.ndarray:
    """[N, Q] of the rows' bases. Keys are gathered only where any row shares a prefix."""
    counts, prefix = lengths.counts, lengths.prefix.astype(np.float64)
    nothing = np.zeros_like(prefix)
    pairs = prefix * (prefix + 1) / 2
    return np.stack(
        [prefix, counts.base_visual, counts.base_patches, prefix, nothing, nothing, pairs, counts.base_pairs], axis=1
    )


def _own(lengths: Lengths) -> np.ndarray:
    """[D, Q] of the prompts behind their prefixes."""
    counts, before = lengths.counts, np.repeat(lengths.prefix, lengths.count).astype(np.float64)
    own = lengths.prompts - before
    shares = bool((lengths.prefix > 0).any())
    columns = {
        "tokens": own,
        "visual": counts.visual,
        "patches": counts.patches,
        "key_rows": (before + own) * shares,
        "documents": np.ones_like(own),
        "answers": counts.answers,
        "pairs": own * before + own * (own + 1) / 2,
        "patch_pairs": counts.patch_pairs,
    }
    return np.stack([columns[name] for name in QUANTITIES], axis=1)


def _kinds(documents: np.ndarray) -> list[np.ndarray]:
    """Numbers of rows with like [N, 2] numbers of positives and negatives, alike as far as KINDS allows."""
    kinds, kind_of = np.unique(documents, axis=0, return_inverse=True)
    order = np.argsort(kind_of.reshape(-1), kind="stable")
    if len(kinds) > KINDS:
        return np.array_split(order, KINDS)
    return np.split(order, np.cumsum(np.bincount(kind_of.reshape(-1)))[:-1])
