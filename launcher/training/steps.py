"""Micro-batches of each step for one rank, prepared one step ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from launcher.errors import ConfigError, Problem
from launcher.spec import RunPlan
from launcher.training.batching import MicroBatch, Unit, collate, make_units, split_step
from launcher.training.encoding import EncodedGroup, Encoder, ImageKey
from launcher.training.formats import Group
from launcher.training.images import ImageError
from launcher.training.jsonl import RowError
from launcher.training.losses import LOSSES
from launcher.training.pixels import Pixels
from launcher.training.schedule import Order

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's share of a global batch."""

    micro_batches: tuple[MicroBatch, ...]
    units: int  # of the loss, on this rank
    groups: float  # queries on this rank; parts of a split group count as parts
    tokens: int


class StepMaker:
    """Turns groups into this rank's micro-batches; the division is the same computation on every rank."""

    def __init__(self, plan: RunPlan, encoder: Encoder, pixels: Pixels, *, rank: int, padded: bool, warn: Warn) -> None:
        self.plan, self.encoder, self.pixels = plan, encoder, pixels
        self.rank, self.padded, self.warn = rank, padded, warn
        self.loss = LOSSES[plan.config.loss.name]

    def training(self, groups: Sequence[Group]) -> Step:
        """This rank's share of a training batch. Rows found bad are refused or left out, as dataset.on_bad says."""
        return self._step(self._encode(groups), splittable=self.loss.per_document)

    def scoring(self, groups: Sequence[Group]) -> Step:
        """This rank's share of rows to score; any group may be split by documents."""
        return self._step(self._encode(groups), splittable=True)

    def _step(self, encoded: list[EncodedGroup], *, splittable: bool) -> Step:
        limit = self.plan.batch.max_tokens
        units: list[Unit] = []
        for index, group in enumerate(encoded):
            try:
                made = make_units([group], self.plan.cost, limit, splittable=splittable)
            except RowError as error:
                self._bad(error)
                continue
            units += [Unit(index, u.documents, u.tokens, u.cost) for u in made]
        mine = split_step(units, self.plan.world_size, limit)[self.rank]
        batches, kept = [], []
        for micro in mine:
            pixels: dict[ImageKey, np.ndarray] = {}
            good = [unit for unit in micro if self._decode(encoded[unit.index], unit, pixels)]
            batches.append(collate(encoded, good, pixels, padded=self.padded))
            kept += good
        documents = sum(len(unit.documents) for unit in kept)
        whole = sum(len(unit.documents) / len(encoded[unit.index].prompts) for unit in kept)
        count = self.loss.count(documents, len({unit.index for unit in kept}))
        return Step(tuple(batches), count, whole, sum(b.tokens for b in batches))

    def _encode(self, groups: Sequence[Group]) -> list[EncodedGroup]:
        encoded = []
        for group in groups:
            try:
                encoded.append(self.encoder.encode(group))
            except (RowError, ImageError) as error:
                self._bad(error, group)
        return encoded

    def _decode(self, group: EncodedGroup, unit: Unit, pixels: dict[ImageKey, np.ndarray]) -> bool:
        """Add the patch rows of a unit's images to `pixels`; false when one can't be read."""
        try:
            for slot in (slot for d in unit.documents for slot in group.prompts[d].images):
                if slot.key not in pixels:
                    pixels[slot.key] = self.pixels.rows(slot)
        except ImageError as error:
            self._bad(error, group.group)
            return False
        return True

    def _bad(self, error: Exception, group: Group | None = None) -> None:
        where = f"{group.where}: row {group.id}: " if group is not None and group.where not in str(error) else ""
        if self.plan.config.dataset.on_bad == "error":
            problem = Problem(f"{where}{error}", tries=("mend the row", "dataset.on_bad=skip"))
            raise ConfigError(problem, title="with the data") from error
        self.warn(f"left out: {where}{error}")


def prefetched(make: Callable[[int], Step], first: int, last: int) -> Iterator[Step]:
    """make(first) .. make(last - 1), each begun while the one before is being used."""
    with ThreadPoolExecutor(1, thread_name_prefix="data") as pool:
        ahead = pool.submit(make, first) if first < last else None
        for step in range(first, last):
            assert ahead is not None
            current = ahead.result()
            ahead = pool.submit(make, step + 1) if step + 1 < last else None
            yield current


def training_steps(maker: StepMaker, groups: Sequence[Group], order: Order, first: int, last: int) -> Iterator[Step]:
    """This rank's shares of optimizer steps first .. last - 1."""
    return prefetched(lambda step: maker.training([groups[row] for row in order.batch(step)]), first, last)
