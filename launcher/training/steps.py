"""Micro-batches of each step for one rank, prepared one step ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from launcher.errors import ConfigError, MachineError, Problem
from launcher.families import family_of
from launcher.spec import RunPlan
from launcher.training.batching import MicroBatch, Unit, collate, make_units, split_step
from launcher.training.encoding import Encoded, RowEncoder
from launcher.training.images import MediaError
from launcher.training.jsonl import RowError
from launcher.training.losses import loss_of
from launcher.training.models import DTYPES
from launcher.training.pieces import MediaKey
from launcher.training.pixels import Pixels
from launcher.training.rows import Row
from launcher.training.sampling import choose
from launcher.training.schedule import Order

Warn = Callable[[str], None]
T = TypeVar("T")


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
        self,
        plan: RunPlan,
        encoder: RowEncoder,
        pixels: Pixels,
        *,
        rank: int,
        padded: bool,
        warn: Warn,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self.plan, self.encoder, self.pixels = plan, encoder, pixels
        self.speeds = plan.speeds if speeds is None else speeds  # of all ranks
        self.rank, self.padded, self.warn = rank, padded, warn
        self.loss = loss_of(plan.config)
        self.dtype = DTYPES[plan.precision]
        self.padded_rows = family_of(plan.config.model, plan.arch).recurrent

    def training(self, groups: Sequence[Row]) -> Step:
        """This rank's share of a training batch. Rows found bad are refused or left out, as dataset.on_bad says."""
        encoded = self._encode(groups)
        batches, kept = [], list[Unit]()
        for units in self._share(encoded, splittable=not self.loss.whole_groups):
            batch, good = self._micro_batch(encoded, units)
            batches.append(batch)
            kept += good
        documents = sum(len(unit.documents) for unit in kept)
        whole = sum(len(unit.documents) / len(encoded[unit.index].prompts) for unit in kept)
        answers = sum(len(batch.predicted) for batch in batches)
        count = self.loss.count(documents, len({unit.index for unit in kept}), answers)
        return Step(tuple(batches), count, whole, sum(b.tokens for b in batches))

    def scoring(self, groups: Sequence[Row]) -> Iterator[MicroBatch]:
        """This rank's share of rows to score, each micro-batch decoded when it is asked for: nothing is counted
        beforehand. At least one, and as many as on every other rank; any group may be split by documents."""
        encoded = self._encode(groups)
        for units in self._share(encoded, splittable=True):
            yield self._micro_batch(encoded, units)[0]

    def _share(self, encoded: Sequence[Encoded], *, splittable: bool) -> list[list[Unit]]:
        """What this rank computes, a list for each micro-batch."""
        limit = self.plan.batch.max_tokens
        units: list[Unit] = []
        for index, group in enumerate(encoded):
            try:
                made = make_units([group], self.plan.cost, limit, splittable=splittable, padded_rows=self.padded_rows)
            except RowError as error:
                self._bad(error)
                continue
            units += [replace(unit, index=index) for unit in made]
        return split_step(units, self.speeds, limit)[self.rank]

    def _micro_batch(self, encoded: Sequence[Encoded], units: Sequence[Unit]) -> tuple[MicroBatch, list[Unit]]:
        """The units whose media can be read, packed, and which those are."""
        pixels: dict[MediaKey, np.ndarray] = {}
        good = [unit for unit in units if self._decode(encoded[unit.index], unit, pixels)]
        return collate(encoded, good, pixels, padded=self.padded, dtype=self.dtype), good

    def _encode(self, groups: Sequence[Row]) -> list[Encoded]:
        encoded = []
        for group in groups:
            try:
                encoded.append(self.encoder.encode(group))
            except RowError as error:
                self._bad(error, group)
            except MediaError as error:
                if len(self.plan.hosts) > 1:
                    raise self._vanished(error, group) from error
                self._bad(error, group)
        return encoded

    def _vanished(self, error: MediaError, group: Row) -> MachineError:
        """A header that could be read when the rows were prepared. Other hosts may still read it, and would divide the
        batch differently: with several it is never left out."""
        text = f"{group.where}: row {group.id}: {error}, on this host and since the rows were prepared"
        return MachineError(Problem(text, tries=("put the file back on every host, then resume=RUN",)))

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


def prefetched(items: Iterable[T]) -> Iterator[T]:
    """The items, each made in a thread while the one before is being used."""
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="data") as pool:
        ahead = pool.submit(next, source, None)
        while (current := ahead.result()) is not None:
            ahead = pool.submit(next, source, None)
            yield current


def training_steps(maker: StepMaker, groups: Sequence[Row], order: Order, first: int, last: int) -> Iterator[Step]:
    """This rank's shares of optimizer steps first .. last - 1; documents are chosen anew for each epoch."""
    data, train = maker.plan.config.dataset, maker.plan.config.train

    def make(step: int) -> Step:
        epoch = order.epoch(step)
        rows = (int(row) for row in order.batch(step))
        return maker.training([choose(row, groups, data, seed=train.seed, epoch=epoch) for row in rows])

    return prefetched(map(make, range(first, last)))
