"""Micro-batches of each step for one rank: divided, tokenised, decoded and packed ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from launcher.errors import ConfigError, MachineError, Problem
from launcher.families import family_of
from launcher.spec import RunPlan
from launcher.training.batching import MicroBatch, Unit, collate, split_step, units_of
from launcher.training.encoding import Encoded, RowEncoder
from launcher.training.images import MediaError
from launcher.training.jsonl import RowError
from launcher.training.losses import loss_of
from launcher.training.outlines import Outline, outlines_of
from launcher.training.pieces import MediaKey
from launcher.training.pixels import Pixels
from launcher.training.rows import Row, too_large
from launcher.training.sampling import choose
from launcher.training.schedule import Order
from launcher.training.shares import Bad, Media, Share
from launcher.training.workers import Ahead, Here, Pool, data_workers, threads

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's share of a global batch."""

    micro_batches: Iterable[MicroBatch]  # in a run each is made ahead, given once, and kept by nobody
    micro_steps: int
    sees: bool  # whether an image or video is among them
    units: int  # of the loss, on this rank
    groups: float  # queries on this rank; parts of a split group count as parts
    tokens: int

    def held(self) -> Step:
        """The same with all micro-batches in memory at once, which may be used any number of times."""
        return replace(self, micro_batches=tuple(self.micro_batches))


@dataclass(frozen=True, slots=True)
class _Made:
    """A micro-batch, and what was left out of it because its media can't be read."""

    batch: MicroBatch
    bad: tuple[Bad, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that ranks divide among themselves; `row` is asked only for those that this rank needs."""

    size: int
    row: Callable[[int], Row]
    outlines: Sequence[Outline] | None = None  # None: known only once a row is tokenised


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
        device: torch.device | None = None,
        known: Callable[[MediaKey], bool] = lambda key: False,
    ) -> None:
        """`device` is where micro-batches will go: for a GPU they are made in page-locked memory. `known`: whether an
        image need not be decoded, once and for all, since its features are kept."""
        self.plan, self.encoder, self.pixels = plan, encoder, pixels
        self.speeds = plan.speeds if speeds is None else speeds  # of all ranks
        self.rank, self.padded, self.warn, self.known = rank, padded, warn, known
        self.device = device or torch.device("cpu")
        self.loss = loss_of(plan.config)
        self.padded_rows = family_of(plan.config.model, plan.arch).recurrent

    def training(self, groups: Sequence[Row]) -> Step:
        """This rank's share of a training batch, made here and now.

        Rows found bad are refused or left out, as dataset.on_bad says.
        """
        share = self.share(Batch(len(groups), groups.__getitem__), splittable=not self.loss.whole_groups)
        share = self.counted(share, Here())
        return self.step(share, self._made_here(share)).held()

    def scoring(self, groups: Sequence[Row]) -> Iterator[MicroBatch]:
        """This rank's share of rows to score, each micro-batch decoded when it is asked for: nothing is counted
        beforehand. At least one, and as many as on every other rank; any group may be split by documents."""
        yield from self._made_here(self.share(Batch(len(groups), groups.__getitem__), splittable=True))

    def _made_here(self, share: Share) -> Iterator[MicroBatch]:
        here = Here()
        for number in range(len(share.batches)):
            yield self.taken(self.begun(share, number, here).result())

    def share(self, batch: Batch, *, splittable: bool) -> Share:
        """What this rank computes of a batch. Tokenises its own rows, or all where their lengths are not known."""
        encoded: dict[int, Encoded] = {}
        outlines: Mapping[int, Outline]
        if batch.outlines is None:
            every = ((place, self._encode(batch.row(place), alone=False)) for place in range(batch.size))
            encoded = {place: found for place, found in every if found is not None}
            outlines = {place: found.outline(self.plan.cost) for place, found in encoded.items()}
        else:
            outlines = dict(enumerate(batch.outlines))
        units = [unit for place, outline in outlines.items() for unit in self._units(place, outline, batch, splittable)]
        mine = split_step(units, self.speeds, self.plan.batch.max_tokens)[self.rank]
        if batch.outlines is None:
            return Share(encoded, tuple(map(tuple, mine)))
        for place in sorted({unit.index for units in mine for unit in units}):
            found = self._encode(batch.row(place), alone=True)
            if found is not None and self._as_prepared(found, outlines[place]):
                encoded[place] = found
        return Share(encoded, tuple(tuple(unit for unit in units if unit.index in encoded) for units in mine))

    def _units(self, place: int, outline: Outline, batch: Batch, splittable: bool) -> list[Unit]:
        limit = self.plan.batch.max_tokens
        units = units_of(place, outline, limit, splittable=splittable, padded_rows=self.padded_rows)
        for unit in units:
            if (needed := unit.beside(0, 0, 0)) > limit:
                self._bad(RowError(too_large(batch.row(place), len(unit.documents), needed, limit)))
                return []
        return units

    def _as_prepared(self, found: Encoded, outline: Outline) -> bool:
        """Whether a row is as large as it was when its tokens were counted: ranks divided the batch by that."""
        if tuple(map(len, found.prompts)) == outline.lengths and found.tokens <= outline.tokens:
            return True
        reason = f"{found.tokens} tokens, and {outline.tokens} when the rows were prepared; its images have changed"
        self._bad(RowError(reason), found.row)
        return False

    def counted(self, share: Share, pool: Pool) -> Share:
        """The share without units whose media can't be read: what is trained on is counted before the first
        micro-batch. With dataset.on_bad=error such a row ends the run anyway, and nothing is decoded for it now."""
        if self.plan.config.dataset.on_bad == "error":
            return share
        decoded: Media = {}
        for units in share.batches:
            self._decoding(share, units, pool, decoded)
        batches, media = [], []
        for units in share.batches:
            good, bad = share.readable(units, decoded)
            for error, row in bad:
                self._bad(error, row)
            batches.append(good)
            media.append({slot.key: decoded[slot.key] for slot in share.slots(good) if slot.key in decoded})
        return Share(share.encoded, tuple(batches), tuple(media))

    def step(self, share: Share, batches: Iterable[MicroBatch]) -> Step:
        """A counted share as a step that takes its micro-batches from `batches`."""
        return Step(
            micro_batches=batches,
            micro_steps=len(share.batches),
            sees=any(share.slots(units) for units in share.batches),
            units=self.loss.count(share.documents, share.groups, share.answers),
            groups=share.whole_groups,
            tokens=share.tokens,
        )

    def begun(self, share: Share, number: int, pool: Pool) -> Future[_Made]:
        """A micro-batch of a share in the making; its media first, each a piece of work of its own."""
        units = share.batches[number]
        media: Media = {}
        if share.media:
            media = {**share.media[number]}
            share.media[number].clear()  # used once: its pixels go with the micro-batch
        self._decoding(share, units, pool, media)
        return pool.submit(self._packed, share, units, media)

    def _decoding(self, share: Share, units: Sequence[Unit], pool: Pool, media: Media) -> None:
        """Begin to decode what is not in `media`, and add it there."""
        for slot in share.slots(units):
            if slot.key not in media and not self.known(slot.key):
                media[slot.key] = pool.submit(self.pixels.rows, slot)

    def _packed(self, share: Share, units: Sequence[Unit], media: Media) -> _Made:
        good, bad = share.readable(units, media)
        pixels = {slot.key: media[slot.key].result() for slot in share.slots(good) if slot.key in media}
        on_gpu = self.device.type == "cuda"
        return _Made(collate(share.encoded, good, pixels, padded=self.padded, pin=on_gpu), bad)

    def taken(self, made: _Made) -> MicroBatch:
        """A micro-batch that is there; what was left out of it is refused or told, as dataset.on_bad says."""
        for error, row in made.bad:
            self._bad(error, row)
        return made.batch

    def _encode(self, row: Row, *, alone: bool) -> Encoded | None:
        """A row's tokens, None for a bad one. `alone`: no other rank needs them to divide the batch."""
        try:
            return self.encoder.encode(row)
        except RowError as error:
            self._bad(error, row)
        except MediaError as error:
            if len(self.plan.hosts) > 1 and not alone:
                raise self._vanished(error, row) from error
            self._bad(error, row)
        return None

    def _vanished(self, error: MediaError, group: Row) -> MachineError:
        """A header that could be read when the rows were prepared. Other hosts may still read it, and would divide the
        batch differently: with several it is never left out."""
        text = f"{group.where}: row {group.id}: {error}, on this host and since the rows were prepared"
        return MachineError(Problem(text, tries=("put the file back on every host, then resume=RUN",)))

    def _bad(self, error: Exception, group: Row | None = None) -> None:
        where = f"{group.where}: row {group.id}: " if group is not None and group.where not in str(error) else ""
        if self.plan.config.dataset.on_bad == "error":
            problem = Problem(f"{where}{error}", tries=("mend the row", "dataset.on_bad=skip"))
            raise ConfigError(problem, title="with the data") from error
        self.warn(f"left out: {where}{error}")


def training_steps(maker: StepMaker, groups: Sequence[Row], order: Order, first: int, last: int) -> Iterator[Step]:
    """This rank's shares of optimizer steps first .. last - 1; documents are chosen anew for each epoch.

    The micro-batches of a step are to be taken before the next one is asked for.
    """
    data, seed = maker.plan.config.dataset, maker.plan.config.train.seed
    outlines, splittable = outlines_of(groups, maker.plan), not maker.loss.whole_groups

    def batch(step: int) -> Batch:
        epoch, rows = order.epoch(step), [int(row) for row in order.batch(step)]
        known = None if outlines is None else [outlines.chosen(row, epoch=epoch) for row in rows]
        return Batch(len(rows), lambda place: choose(rows[place], groups, data, seed=seed, epoch=epoch), known)

    def shares(pool: Pool) -> Iterator[Share | Future[_Made]]:
        for step in range(first, last):
            share = maker.counted(maker.share(batch(step), splittable=splittable), pool)
            yield share
            yield from (maker.begun(share, number, pool) for number in range(len(share.batches)))

    with threads(data_workers(maker.plan), maker.device) as (planner, pool):
        ahead: Ahead[Share, _Made] = Ahead(shares(pool), planner)
        while (share := ahead.mark()) is not None:
            yield maker.step(share, (maker.taken(ahead.result()) for _ in share.batches))


def scoring_batches(maker: StepMaker, rows: Sequence[Row], size: int) -> Iterator[tuple[int, MicroBatch]]:
    """This rank's share of rows to score, `size` of them divided at a time: (number of the first of these, a
    micro-batch of some of them). As many on every rank."""
    outlines = outlines_of(rows, maker.plan)

    def batch(first: int) -> Batch:
        count = min(size, len(rows) - first)
        known = None if outlines is None else [outlines.whole(first + place) for place in range(count)]
        return Batch(count, lambda place: rows[first + place], known)

    def shares(pool: Pool) -> Iterator[tuple[int, int] | Future[_Made]]:
        for first in range(0, len(rows), size):
            share = maker.share(batch(first), splittable=True)
            yield first, len(share.batches)
            yield from (maker.begun(share, number, pool) for number in range(len(share.batches)))

    with threads(data_workers(maker.plan), maker.device) as (planner, pool):
        ahead: Ahead[tuple[int, int], _Made] = Ahead(shares(pool), planner)
        while (mark := ahead.mark()) is not None:
            for _ in range(mark[1]):
                yield mark[0], maker.taken(ahead.result())
