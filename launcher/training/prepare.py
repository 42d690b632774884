"""The rows a run trains or is measured on: prepared once a node, then the same memory-mapped files for each rank.

Ranks come here before they form a process group, so that no time limit of NCCL or gloo runs while one of them works
and the others wait. Each reaches the same rows by the same rules, and `agreed` compares what they reached.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from launcher.datafiles import is_divided, sources_of
from launcher.errors import ConfigError, MachineError, Problem
from launcher.prepared import cache_dir, has_split, lengths_folder, rows_folder
from launcher.spec import RunConfig, RunPlan
from launcher.training.jsonl import BadRow
from launcher.training.progress import progress, quiet
from launcher.training.rows import Row
from launcher.training.rowstore import RowStore, stored

if TYPE_CHECKING:
    from launcher.training.lengths import Lengths

SHOWN_BAD, SHOWN_LONG = 20, 10  # rows named in a message
SHOWN_ALIKE = 3  # of them with the same reason
LOCK_TICK_S = 0.2  # between two looks at a lock that another process holds


@dataclass(frozen=True, eq=False)
class Prepared(Sequence[Row]):
    """The rows of a split that the run uses, in the order of the data."""

    store: RowStore | None  # None: an eval split that isn't given
    lengths: Lengths | None
    kept: np.ndarray  # [rows] numbers of the usable rows in the store
    left_out: tuple[BadRow, ...] = ()  # too long for a prompt or a micro-batch

    def __len__(self) -> int:
        return len(self.kept)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        assert self.store is not None
        return self.store[int(self.kept[index])]

    @property
    def bad(self) -> list[BadRow]:
        """All rows that are not used."""
        return [*(self.store.bad if self.store else ()), *self.left_out]

    @property
    def has_media(self) -> bool:
        """Whether any of its rows, usable or not, shows an image or a video."""
        return self.store is not None and self.store.has_media

    @cached_property
    def tokens(self) -> np.ndarray:
        """[rows] tokens of each row with all its documents, the shared prefix once."""
        return np.zeros(0, np.int64) if self.lengths is None else self.lengths.tokens[self.kept]

    def summary(self) -> dict[str, Any] | None:
        """What `launcher.prepared.read_summary` says of the split; None for one that isn't given."""
        from launcher.training.lengths import summary

        if self.store is None or self.lengths is None:
            return None
        return {**self.store.summary, "lengths": summary(self.lengths, self.store)}

    @cached_property
    def digest(self) -> str:
        """Equal for equal rows: their lengths and which of them are used."""
        found = hashlib.sha256(self.kept.astype(np.int64).tobytes())
        if self.lengths is not None:
            found.update(np.ascontiguousarray(self.lengths.prompts).tobytes())
        return found.hexdigest()[:16]


def prepare(
    plan: RunPlan, split: str, beat: Callable[[], None] = quiet, *, problems: list[Problem] | None = None
) -> Prepared:
    """The usable rows of "train" or "eval" with their lengths, from the cache or made now by one process of the node.

    `beat` is called while this process works or waits. Rows that can't be used, unless `dataset.on_bad` and
    `dataset.max_bad_fraction` allow to leave them out, raise ConfigError, or are added to `problems`.
    """
    from launcher.training.lengths import counted, too_many

    if not has_split(plan.config, split):
        return Prepared(None, None, np.zeros(0, np.int64))
    folder = rows_folder(plan.config, split)
    with locked(folder, beat):
        store = _stored(plan, split, beat, decode=False)
        if problems is None:
            _refuse(problems_of(plan.config, split, store))
        with progress(f"counting the tokens of the {split} rows", beat) as say:
            lengths = counted(plan, store, lengths_folder(plan.config, folder), say)
    unfit = lengths.unfit | too_many(plan, store, lengths, split)
    kept = np.setdiff1d(np.arange(len(store)), np.fromiter(unfit, np.int64))
    left_out = tuple(BadRow(store[row].where, store[row].id, f"too long: {unfit[row]}") for row in sorted(unfit))
    prepared = Prepared(store, lengths, kept, left_out)
    found = length_problems(plan.config, split, prepared)
    if problems is None:
        _refuse(found)
    else:
        problems += found
    return prepared


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(*problems, title="with the data")


def read_rows(plan: RunPlan, split: str, *, decode: bool = False) -> RowStore | None:
    """The rows of a split without their lengths, good and bad; needs no torch. None for an eval split that isn't given.

    Raises ConfigError for what is no data set.
    """
    if not has_split(plan.config, split):
        return None
    with locked(rows_folder(plan.config, split)):
        return _stored(plan, split, quiet, decode=decode)


def _stored(plan: RunPlan, split: str, beat: Callable[[], None], *, decode: bool) -> RowStore:
    from PIL.Image import DecompressionBombWarning

    with warnings.catch_warnings(), progress(f"reading the {split} rows", beat) as say:
        # Pillow's warning names no file; pictures beyond twice that size are refused by name.
        warnings.simplefilter("ignore", DecompressionBombWarning)
        return stored(plan, split, say, decode=decode)


@contextmanager
def locked(folder: Path, beat: Callable[[], None] = quiet) -> Iterator[None]:
    """Hold the lock of a folder of the cache; the kernel takes it back from a process that dies.

    Raises MachineError when the cache can't be written.
    """
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        file = open(folder.with_name(f"{folder.name}.lock"), "a")  # noqa: SIM115
    except OSError as error:
        raise _unwritten(error) from error
    with file:
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    print("another process is preparing these rows; waiting for it", flush=True)
                said = True
                beat()
                time.sleep(LOCK_TICK_S)
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise _unwritten(error) from error


def _unwritten(error: OSError) -> MachineError:
    reason = os.strerror(error.errno or 0)  # pyarrow's own text says more than that
    text = f"prepared rows are kept in {cache_dir()}, which cannot be written: {reason}"
    tries = ("XDG_CACHE_HOME=FOLDER in the environment",)
    return MachineError(Problem(text, tries=tries), title="with this machine")


def problems_of(config: RunConfig, split: str, store: RowStore) -> list[Problem]:
    """What the user must change when rows can't be used: all of it, or what `dataset.on_bad=skip` does not allow."""
    key, bad, good = f"dataset.{split}", store.bad, len(store)
    source = ", ".join(sources_of(config.dataset, split)) or config.dataset.name
    if bad and (config.dataset.on_bad == "error" or not good):
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(row.kind for row in bad).most_common())
        lines = [f"{len(bad):,} of {len(bad) + good:,} rows of {key}={source} can't be used: {kinds}"]
        shown = _examples(bad)
        lines += [f"{row.where}  id {row.id}  {row.reason}" for row in shown]
        if len(bad) > len(shown):
            lines.append(f"and {len(bad) - len(shown):,} more")
        tries = (*_remedies(config, bad), "mend these rows", *(("dataset.on_bad=skip",) if good else ()))
        return [Problem("\n".join(lines), tries=tries)]
    if not good and is_divided(config.dataset):
        text = f"dataset.eval_fraction={config.dataset.eval_fraction:g} leaves no {split} row of {source}"
        return [Problem(text, tries=("dataset.eval_fraction=0.5", "dataset.eval=FILE.jsonl"))]
    if not good:
        return [Problem(f"{key}={source} has no rows", tries=(f"{key}=FILE.jsonl with at least one row",))]
    return _above_limit(config, split, bad, good)


def _examples(bad: Sequence[BadRow]) -> list[BadRow]:
    """Some of the bad rows: with thousands that are wrong alike, none that is wrong otherwise is lost."""
    seen: Counter[str] = Counter()
    shown = []
    for row in bad:
        seen[row.reason] += 1
        if seen[row.reason] <= SHOWN_ALIKE:
            shown.append(row)
    return shown[:SHOWN_BAD]


def _remedies(config: RunConfig, bad: Sequence[BadRow]) -> Iterator[str]:
    """What to type where the rows are not to blame."""
    kinds = {row.kind for row in bad}
    if kinds == {"a chat"}:
        yield "task=sft   (trains on chats)"
    if kinds == {"a query with documents"}:
        yield "task=rerank   (trains on queries with documents)"
    if any(kind.endswith("file missing") for kind in kinds) and config.dataset.image_root is None:
        yield "dataset.image_root=FOLDER   (else paths are relative to the data file's folder)"


def length_problems(config: RunConfig, split: str, rows: Prepared) -> list[Problem]:
    """Likewise for rows that are too long."""
    long = [row.reason.removeprefix("too long: ") for row in rows.left_out]
    if long and (config.dataset.on_bad == "error" or not len(rows)):
        lines = [f"the {split} data has {len(long):,} too long row{'s' if len(long) != 1 else ''}:", *long[:SHOWN_LONG]]
        if len(long) > SHOWN_LONG:
            lines.append(f"and {len(long) - SHOWN_LONG:,} more")
        tries = ("a larger dataset.max_length or batch.max_tokens", *(("dataset.on_bad=skip",) if len(rows) else ()))
        return [Problem("\n".join(lines), tries=tries)]
    return _above_limit(config, split, rows.bad, len(rows)) if long else []


def _above_limit(config: RunConfig, split: str, bad: Sequence[BadRow], good: int) -> list[Problem]:
    """A run that leaves out more rows than `dataset.max_bad_fraction` would train on something else than was meant."""
    limit, part = config.dataset.max_bad_fraction, len(bad) / (len(bad) + good)
    if part <= limit:
        return []
    lines = [f"{len(bad):,} of {len(bad) + good:,} rows of dataset.{split} are left out ({100 * part:.1f} %), and"]
    lines[0] += f" dataset.max_bad_fraction={limit:g}:"
    lines += [f"{count:>8,}  {kind}" for kind, count in Counter(row.kind for row in bad).most_common()]
    lines += [f"{row.where}  id {row.id}  {row.reason}" for row in bad[:SHOWN_LONG]]
    return [
        Problem(
            "\n".join(lines), tries=("mend these rows", f"dataset.max_bad_fraction={math.ceil(part * 100) / 100:g}")
        )
    ]


def agreed(plan: RunPlan, digests: Sequence[Any]) -> None:
    """Raise MachineError when ranks (each with the digests of its splits) hold other rows than the first.

    Trained on, these would have them wait for each other, or learn from different data.
    """
    wrong = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if wrong:
        hosts = [host.name for host in plan.hosts for _ in range(host.slots)]
        names = ", ".join(dict.fromkeys(hosts[rank] for rank in wrong))
        text = f"the rows prepared on {names} are not those of {hosts[0]}: another data file, image or tokenizer"
        tries = ("make the files equal", f"rm -r {cache_dir()}   (on each host)")
        raise MachineError(Problem(text, tries=tries), title="with the data")
