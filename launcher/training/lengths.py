"""Tokens of every row, counted before training: a row that fits nowhere is found now and not hours in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from launcher.errors import ConfigError, Problem
from launcher.spec import RunPlan
from launcher.training.batching import make_units
from launcher.training.encoding import Encoder
from launcher.training.formats import Group
from launcher.training.images import ImageError
from launcher.training.jsonl import RowError
from launcher.training.losses import LOSSES

SHOWN = 10  # rows named in a message


@dataclass
class Lengths:
    """Row number -> its tokens (prefix once), or why it can't be trained on; documents that lost their end."""

    tokens: dict[int, int] = field(default_factory=dict)
    unfit: dict[int, str] = field(default_factory=dict)
    cut: int = 0

    def add(self, other: Lengths) -> None:
        """Take in the rows that another rank measured."""
        self.tokens |= other.tokens
        self.unfit |= other.unfit
        self.cut += other.cut


def measure(plan: RunPlan, encoder: Encoder, groups: Sequence[Group], rows: Iterable[int], split: str) -> Lengths:
    """Tokenise `rows` of a split ("train" or "eval"); images are only looked at for their size."""
    # Held-out groups are scored document by document, so any number of documents fits.
    splittable = split == "eval" or LOSSES[plan.config.loss.name].per_document
    found = Lengths()
    for row in rows:
        try:
            encoded = encoder.encode(groups[row])
            make_units([encoded], plan.cost, plan.batch.max_tokens, splittable=splittable)
        except (RowError, ImageError) as error:
            found.unfit[row] = str(error)
            continue
        found.tokens[row] = encoded.tokens
        found.cut += sum(len(prompt) == plan.config.dataset.max_length for prompt in encoded.prompts)
    return found


def refusal(plan: RunPlan, lengths: Lengths, split: str) -> Problem | None:
    """What the user must change, unless dataset.on_bad=skip leaves the rows out and others remain."""
    unfit = [lengths.unfit[row] for row in sorted(lengths.unfit)]
    if not unfit or (plan.config.dataset.on_bad == "skip" and lengths.tokens):
        return None
    lines = [f"the {split} data has {len(unfit):,} too long row{'s' if len(unfit) != 1 else ''}:", *unfit[:SHOWN]]
    if len(unfit) > SHOWN:
        lines.append(f"and {len(unfit) - SHOWN:,} more")
    tries = ("a larger dataset.max_length or batch.max_tokens", *(("dataset.on_bad=skip",) if lengths.tokens else ()))
    return Problem("\n".join(lines), tries=tries)


def fitting(plan: RunPlan, lengths: Lengths, groups: Sequence[Group], split: str) -> list[Group]:
    """The groups that can be trained on; raises ConfigError when there are others and the policy forbids it."""
    problem = refusal(plan, lengths, split)
    if problem is not None:
        raise ConfigError(problem, title="with the data")
    return [group for row, group in enumerate(groups) if row not in lengths.unfit]
