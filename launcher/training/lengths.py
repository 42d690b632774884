"""Tokens of every row, counted once a node before training: a row that fits nowhere is found now and not hours in.

Shapes: N rows, D prompts of all rows (a group has one a document, a chat has one).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from launcher.families import family_of
from launcher.prepared import DAMAGED, SUMMARY, summary_of
from launcher.rundir import read_json, write_json
from launcher.spec import DatasetConfig, RunPlan
from launcher.training.counts import (
    PROMPT_COUNTS,
    ROW_COUNTS,
    Counts,
    count_row,
    join_counts,
    load_summary,
    make_counts,
)
from launcher.training.losses import loss_of
from launcher.training.progress import Say
from launcher.training.rows import Image, Row, too_large
from launcher.training.rowstore import RowStore

CHUNK = 64  # rows counted between two signs of progress, or by a process of the pool at a time
POOL_S = 20.0  # a pool costs some seconds to start: it is worth it when so much work is left for one process
WARM_S = 2.0  # the first rows take longer, and say nothing of the others


@dataclass(frozen=True)
class Lengths:
    """What rows need, and why some can't be trained on; rows of several parts are joined with `join`."""

    prefix: np.ndarray  # [N] int32: tokens that all prompts of a row share
    count: np.ndarray  # [N] int32: prompts of a row, 0 for one without any length
    positives: np.ndarray  # [N] int32: those of relevant documents, which come first
    prompts: np.ndarray  # [D] int32: whole lengths, prefix included
    cut: np.ndarray  # [N] int32: prompts that lost the end of their text
    shrunk: np.ndarray  # [N] int32: prompts whose images were scaled down to fit
    counts: Counts  # media and answers
    unfit: dict[int, str]  # row -> why its prompts can't be made

    @cached_property
    def starts(self) -> np.ndarray:
        """[N + 1]: where a row's prompts begin in `prompts`."""
        return np.concatenate([[0], np.cumsum(self.count)])

    @cached_property
    def tokens(self) -> np.ndarray:
        """[N] int64: tokens of a row with all its documents, the prefix once; 0 for one without any length."""
        sums = np.concatenate([[0], np.cumsum(self.prompts, dtype=np.int64)])
        whole = sums[self.starts[1:]] - sums[self.starts[:-1]]
        return whole - self.prefix * np.maximum(self.count - 1, 0)

    def own(self, row: int) -> np.ndarray:
        """Tokens of each of a row's prompts behind the shared prefix."""
        return self.prompts[self.starts[row] : self.starts[row + 1]] - self.prefix[row]


def join(parts: Sequence[Lengths]) -> Lengths:
    """Parts of consecutive rows as one."""
    unfit: dict[int, str] = {}
    first = 0
    for part in parts:
        unfit |= {first + row: why for row, why in part.unfit.items()}
        first += len(part.count)
    names = ("prefix", "count", "positives", "prompts", "cut", "shrunk")
    arrays = {name: [getattr(part, name) for part in parts] for name in names}
    empty = np.zeros(0, np.int32)
    joined = {name: np.concatenate([empty, *found]) for name, found in arrays.items()}
    return Lengths(**joined, unfit=unfit, counts=join_counts([part.counts for part in parts]))


def measure(encoder: Any, rows: Iterable[Row], max_length: int, rule: Any = None) -> Lengths:
    """Tokenise rows; images are only looked at for their size. With `rule` (a MediaRule) shrunk images are counted."""
    from launcher.training.images import MediaError
    from launcher.training.jsonl import RowError

    table: list[tuple[int, ...]] = []
    prompts: list[int] = []
    row_counts: list[tuple[float, ...]] = []
    prompt_counts: list[tuple[float, ...]] = []
    unfit = {}
    for number, row in enumerate(rows):
        try:
            encoded = encoder.encode(row)
        except (RowError, MediaError) as error:
            named = row.where in str(error)
            unfit[number] = str(error) if named else f"{row.where}: row {row.id}: {error}"
            table.append((0, 0, 0, 0, 0))
            row_counts.append((0,) * len(ROW_COUNTS))
            continue
        lengths = [len(prompt) for prompt in encoded.prompts]
        prompts += lengths
        shrunk = 0 if rule is None else sum(_is_shrunk(prompt, rule) for prompt in encoded.prompts)
        relevant = sum(label > 0 for label in encoded.labels)
        table.append((encoded.prefix, len(lengths), relevant, lengths.count(max_length), shrunk))
        of_row, of_prompts = count_row(encoded)
        row_counts.append(of_row)
        prompt_counts += of_prompts
    prefix, count, positives, cut, shrunken = np.asarray(table, np.int32).reshape(-1, 5).T
    counts = make_counts(row_counts, prompt_counts)
    return Lengths(prefix, count, positives, np.asarray(prompts, np.int32), cut, shrunken, counts, unfit)


def _is_shrunk(prompt: Any, rule: Any) -> bool:
    for slot in prompt.media:
        whole = rule.image(slot.media) if isinstance(slot.media, Image) else rule.clip(slot.media.video)[1]
        if slot.grid != whole:
            return True
    return False


def too_many(plan: RunPlan, rows: Sequence[Row], lengths: Lengths, split: str) -> dict[int, str]:
    """Rows that no micro-batch can hold -> why. Of documents that are drawn anew each epoch the longest count."""
    together = split == "train" and loss_of(plan.config).whole_groups
    padded = family_of(plan.config.model, plan.arch).recurrent  # each document takes as much room as the longest
    limit, found = plan.batch.max_tokens, {}
    own = lengths.prompts - np.repeat(lengths.prefix, lengths.count)
    foreign = np.full(plan.config.dataset.random_negatives if together else 0, own.max(initial=0))
    may_be = (lengths.count > 0) & (padded | (lengths.tokens + foreign.sum() > limit))
    for row in np.nonzero(may_be)[0].tolist():
        own = _largest_choice(lengths, row, plan.config.dataset) if together else lengths.own(row).max(keepdims=True)
        own = np.concatenate([own, foreign])
        tokens, longest = int(lengths.prefix[row] + own.sum()), int(lengths.prefix[row] + own.max())
        tokens = max(tokens, len(own) * longest) if padded else tokens
        if tokens > limit:
            found[row] = too_large(rows[row], len(own), tokens, limit)
    return found


def _largest_choice(lengths: Lengths, row: int, data: DatasetConfig) -> np.ndarray:
    """Tokens behind the prefix of the longest documents that may be drawn together."""
    own, split = lengths.own(row), int(lengths.positives[row])
    if data.video.segment_s is not None:  # several prompts may be one document
        return own
    sides = ((own[:split], data.max_positives), (own[split:], data.max_negatives))
    return np.concatenate([np.sort(side)[::-1][:most] for side, most in sides])


def counted(plan: RunPlan, store: RowStore, folder: Path, say: Say, *, pool_s: float = POOL_S) -> Lengths:
    """The tokens of all rows, from `folder` or counted now; the caller holds the lock of the rows."""
    with suppress(*DAMAGED):
        if summary_of(folder) is not None:
            return _read(folder)
    _write(folder, _count(plan, store, say, pool_s), store)
    return _read(folder)


def _count(plan: RunPlan, store: RowStore, say: Say, pool_s: float) -> Lengths:
    """In this process, and once it is clear that much is left, in one for each processor."""
    measurer, parts, done = _Measurer(plan, store), [], 0
    begun = time.monotonic()
    while done < len(store):
        parts.append(measurer.measure(done, min(done + CHUNK, len(store))))
        done = min(done + CHUNK, len(store))
        say(done, len(store))
        spent_s = time.monotonic() - begun
        worth = spent_s / done * (len(store) - done) > pool_s
        if done < len(store) and worth and spent_s > min(WARM_S, pool_s) and len(_processors()) > 1:
            parts += _in_pool(plan, store, done, say)
            break
    return join(parts)


class _Measurer:
    """Measures ranges of rows, in whatever process it is made."""

    def __init__(self, plan: RunPlan, store: RowStore) -> None:
        from launcher.training.encoding import make_encoder
        from launcher.training.media import media_rule
        from launcher.training.processors import load_processor

        processor = load_processor(plan)
        self.encoder, self.store = make_encoder(plan, processor), store
        self.max_length = plan.config.dataset.max_length
        self.rule = media_rule(plan, processor) if plan.config.dataset.over_long == "shrink" else None

    def measure(self, first: int, last: int) -> Lengths:
        """Rows first .. last - 1."""
        return measure(self.encoder, self.store[first:last], self.max_length, self.rule)


_ready: list[_Measurer] = []  # the one of a process of the pool


def _in_pool(plan: RunPlan, store: RowStore, first: int, say: Say) -> list[Lengths]:
    processors = _processors()
    context = get_context("forkserver")  # what it has imported is there in each process at once
    context.set_forkserver_preload(["launcher.training.encoding", "launcher.training.processors", "torch"])
    ranges = [(at, min(at + CHUNK, len(store))) for at in range(first, len(store), CHUNK)]
    workers = min(len(processors), len(ranges))
    with ProcessPoolExecutor(workers, context, _begin, (plan, store.folder, processors)) as pool:
        futures = [pool.submit(_measure, *one) for one in ranges]
        waiting: set[Future[Lengths]] = set(futures)
        while waiting:
            _, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
            say(min(len(store), first + CHUNK * (len(futures) - len(waiting))), len(store))
        return [future.result() for future in futures]


def _begin(plan: RunPlan, folder: Path, processors: set[int]) -> None:
    """Make a process of the pool ready: it dies with its parent, and leaves threads to the others."""
    from launcher.training.rankstatus import die_with_parent

    die_with_parent()
    os.sched_setaffinity(0, processors)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _ready.append(_Measurer(plan, RowStore(folder)))


def _measure(first: int, last: int) -> Lengths:
    return _ready[0].measure(first, last)


def _processors() -> set[int]:
    """Those this process may use, and those of its parent: a rank is bound to a part of them."""
    return os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())


def _write(folder: Path, lengths: Lengths, store: RowStore) -> None:
    """Write the table; the folder appears whole."""
    import pyarrow as pa

    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    columns = {name: pa.array(getattr(lengths, name)) for name in ("prefix", "positives", "cut", "shrunk")}
    columns |= {name: pa.array(getattr(lengths.counts, name)) for name in ROW_COUNTS}
    starts, counts = pa.array(lengths.starts.astype(np.int32)), lengths.counts
    lists = {"prompts": lengths.prompts, **{name: getattr(counts, name) for name in PROMPT_COUNTS}}
    columns |= {name: pa.ListArray.from_arrays(starts, pa.array(values)) for name, values in lists.items()}
    table = pa.table(columns)
    with pa.OSFile(str(aside / "lengths.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_json(aside / "unfit.json", {str(row): why for row, why in lengths.unfit.items()})
    write_json(aside / SUMMARY, summary(lengths, store))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def _read(folder: Path) -> Lengths:
    import pyarrow as pa

    table = pa.ipc.open_file(pa.memory_map(str(folder / "lengths.arrow"))).read_all().combine_chunks()
    names = ("prefix", "positives", "cut", "shrunk", *ROW_COUNTS)
    columns = {name: _numbers(_whole(table[name])) for name in names}
    lists = {name: _whole(table[name]) for name in ("prompts", *PROMPT_COUNTS)}
    unfit = {int(row): why for row, why in read_json(folder / "unfit.json").items()}
    count = np.diff(_numbers(lists["prompts"].offsets)).astype(np.int32)
    columns |= {name: _numbers(found.values) for name, found in lists.items()}
    counts = Counts(**{name: columns.pop(name) for name in (*ROW_COUNTS, *PROMPT_COUNTS)})
    return Lengths(count=count, unfit=unfit, counts=counts, **columns)


def _numbers(array: Any) -> np.ndarray:
    """pyarrow's numbers as numpy's, where they lie; its own to_numpy imports pandas for it, where that is installed."""
    return np.from_dlpack(array)


def _whole(column: Any) -> Any:
    """A table's column as one array."""
    found = column.combine_chunks()
    return found.chunk(0) if hasattr(found, "chunk") else found


def summary(lengths: Lengths, rows: Sequence[Row]) -> dict[str, Any]:
    """JSON-ready: tokens a row (all its documents, the prefix once), their histogram, what was cut or left out."""
    tokens = np.sort(lengths.tokens[lengths.count > 0])
    found: dict[str, Any] = {
        "rows": len(tokens),
        "tokens": int(tokens.sum()),
        "cut": int(lengths.cut.sum()),
        "shrunk": int(lengths.shrunk.sum()),
        "too_long": len(lengths.unfit),
    }
    if len(tokens):
        longest = int(np.argmax(lengths.tokens))
        row = rows[longest]
        found |= {
            "mean": float(tokens.mean()),
            "median": int(tokens[len(tokens) // 2]),
            "p95": int(tokens[len(tokens) * 95 // 100]),
            "longest": {"id": row.id, "where": row.where, "tokens": int(lengths.tokens[longest])},
            "histogram": histogram(tokens),
            "load": load_summary(lengths),
        }
    return found


def histogram(tokens: np.ndarray) -> list[list[int]]:
    """[from, below, rows] for steps of a half and a third, 16 24 32 48 64 ..., from the first to the last with a row.

    Example:
        >>> histogram(np.array([20, 21, 40]))
        [[16, 24, 2], [24, 32, 0], [32, 48, 1]]
    """
    edges = np.array([0, *(step << power for power in range(27) for step in (16, 24))])
    counts, _ = np.histogram(tokens, edges)
    used = np.nonzero(counts)[0]
    return [[int(edges[i]), int(edges[i + 1]), int(counts[i])] for i in range(used[0], used[-1] + 1)]
