"""Micro-batches of each step for one rank, prepared one step ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from launcher.errors import ConfigError, Problem
from launcher.families import family_of
from launcher.spec import RunPlan
from launcher.training.batching import MicroBatch, Unit, collate, make_units, split_step
from launcher.training.encoding import Encoded, MediaKey, RowEncoder
from launcher.training.images import MediaError
from launcher.training.jsonl import RowError
from launcher.training.losses import loss_of
from launcher.training.pixels import Pixels
from launcher.training.rows import Row
from launcher.training.sampling import choose
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

    def __init__(
        self, plan: RunPlan, encoder: RowEncoder, pixels: Pixels, *, rank: int, padded: bool, warn: Warn
    ) -> None:
        self.plan, self.encoder, self.pixels = plan, encoder, pixels
        self.rank, self.padded, self.warn = rank, padded, warn
        self.loss = loss_of(plan.config)
        self.padded_rows = family_of(plan.config.model, plan.arch).recurrent

    def training(self, groups: Sequence[Row]) -> Step:
        """This rank's share of a training batch. Rows found bad are refused or left out, as dataset.on_bad says."""
        return self._step(self._encode(groups), splittable=not self.loss.whole_groups)

    def scoring(self, groups: Sequence[Row]) -> Step:
        """This rank's share of rows to score; any group may be split by documents."""
        return self._step(self._encode(groups), splittable=True)

    def _step(self, encoded: list[Encoded], *, splittable: bool) -> Step:
        limit = self.plan.batch.max_tokens
        units: list[Unit] = []
        for index, group in enumerate(encoded):
            try:
                made = make_units([group], self.plan.cost, limit, splittable=splittable, padded_rows=self.padded_rows)
            except RowError as error:
                self._bad(error)
                continue
            units += [replace(unit, index=index) for unit in made]
        mine = split_step(units, self.plan.speeds, limit)[self.rank]
        batches, kept = [], []
        for micro in mine:
            pixels: dict[MediaKey, np.ndarray] = {}
            good = [unit for unit in micro if self._decode(encoded[unit.index], unit, pixels)]
            batches.append(collate(encoded, good, pixels, padded=self.padded))
            kept += good
        documents = sum(len(unit.documents) for unit in kept)
        whole = sum(len(unit.documents) / len(encoded[unit.index].prompts) for unit in kept)
        answers = sum(len(batch.predicted) for batch in batches)
        count = self.loss.count(documents, len({unit.index for unit in kept}), answers)
        return Step(tuple(batches), count, whole, sum(b.tokens for b in batches))

    def _encode(self, groups: Sequence[Row]) -> list[Encoded]:
        encoded = []
        for group in groups:
            try:
                encoded.append(self.encoder.encode(group))
            except (RowError, MediaError) as error:
                self._bad(error, group)
        return encoded

    def _decode(self, group: Encoded, unit: Unit, pixels: dict[MediaKey, np.ndarray]) -> bool:
        """Add the patch rows of a unit's images to `pixels`; false when one can't be read."""
        try:
            for slot in (slot for d in unit.documents for slot in group.prompts[d].media):
                if slot.key not in pixels:
                    pixels[slot.key] = self.pixels.rows(slot)
        except MediaError as error:
            self._bad(error, group.row)
            return False
        return True

    def _bad(self, error: Exception, group: Row | None = None) -> None:
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


def training_steps(maker: StepMaker, groups: Sequence[Row], order: Order, first: int, last: int) -> Iterator[Step]:
    """This rank's shares of optimizer steps first .. last - 1; documents are chosen anew for each epoch."""
    data, train = maker.plan.config.dataset, maker.plan.config.train

    def make(step: int) -> Step:
        epoch = order.epoch(step)
        rows = (int(row) for row in order.batch(step))
        return maker.training([choose(row, groups, data, seed=train.seed, epoch=epoch) for row in rows])

    return prefetched(make, first, last)
