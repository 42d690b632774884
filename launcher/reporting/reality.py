"""The plan beside what happened: memory, steps, batch, micro-batches."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from launcher.reporting import words
from launcher.reporting.numbers import column, gpus, peak_gib, rank_peaks
from launcher.reporting.record import Record, known, number, numbers, part_of
from launcher.reporting.table import Table
from launcher.running.journal import Line

UNKNOWN = "not known"
SHOWN_RANKS = 64
BYTES_A_GIB = 2**30


def reality_table(record: Record) -> Table:
    """Planned, seen, and seen divided by planned."""
    rows = [
        *_memory_rows(record),
        *_step_rows(record),
        *_batch_rows(record),
    ]
    return Table(
        title="Plan against reality",
        head=("", "planned", "seen", "seen / planned"),
        rows=rows,
        right=(1, 2, 3),
        about="Memory that torch allocates is held against the plan without its part 'context', which lies outside "
        "torch; what the driver reports, against all of it.",
    )


def planned_gib(record: Record, *, context: bool = False) -> float | None:
    """The plan's estimate for one GPU or rank, with or without what lies outside torch's allocator."""
    parts = {name: number(value) or 0.0 for name, value in part_of(record.plan, "memory").items()}
    if not parts:
        return None
    return sum(value for name, value in parts.items() if context or name != "context") / BYTES_A_GIB


def _row(name: str, planned: float | None, seen: float | None, unit: str = "") -> list[str]:
    shown = [words.gib(value) if unit == "GiB" else words.count(value) for value in (planned, seen)]
    ratio = seen / planned if planned and seen is not None else None
    return [name, UNKNOWN if planned is None else shown[0], shown[1], words.plain(ratio, ".2f")]


def _memory_rows(record: Record) -> list[list[str]]:
    inside, whole = planned_gib(record), planned_gib(record, context=True)
    peaks = rank_peaks(record.steps)
    rows = [
        _row(f"peak allocated, rank {rank}", inside, peak, "GiB") for rank, peak in list(peaks.items())[:SHOWN_RANKS]
    ]
    if not peaks and (largest := peak_gib(record.steps)) is not None:
        rows.append(_row("peak allocated, largest rank", inside, largest, "GiB"))
    reserved = peak_gib(record.steps, "memory_reserved_gib")
    if reserved is not None:
        rows.append(_row("peak reserved, largest rank", inside, reserved, "GiB"))
    for name, peak in list(_driver_peaks(record).items())[:SHOWN_RANKS]:
        rows.append(_row(f"in use on {name} (driver)", whole, peak, "GiB"))
    if not rows:
        rows.append(_row("memory of one rank, estimated", whole, None, "GiB"))
    return rows


def _driver_peaks(record: Record) -> dict[str, float]:
    """Most memory that the driver reported in use on each GPU of the run."""
    peaks: dict[str, float] = {}
    for entry in record.monitor:
        for gpu in gpus(entry):
            value = number(gpu.get("memory_used_gib"))
            if value is not None:
                name = f"{entry.get('host')} GPU {gpu.get('index')}"
                peaks[name] = max(value, peaks.get(name, 0.0))
    return peaks


def _step_rows(record: Record) -> list[list[str]]:
    last = record.steps[-1] if record.steps else {}
    batch = part_of(record.plan, "batch")
    rows = [
        _row(
            "optimizer steps",
            number(batch.get("total_steps")) or number(last.get("total_steps")),
            number(last.get("step")),
        )
    ]
    if (epoch := number(last.get("epoch"))) and last["step"]:
        rows.append(_row("steps an epoch", number(batch.get("steps_per_epoch")), last["step"] / epoch))
    skipped = number(last.get("skipped"))
    if skipped:
        rows.append(_row("steps skipped, gradient not finite", 0, skipped))
    return rows


def _batch_rows(record: Record) -> list[list[str]]:
    batch, world = part_of(record.plan, "batch"), world_size(record)
    queries = [q * s for q, s in _pairs(record.steps, "queries_per_s")]
    rows = [
        _row("queries a step, mean", number(batch.get("global_size")), statistics.fmean(queries) if queries else None)
    ]
    counts = known(column(record.steps, "micro_steps"))
    mean = statistics.fmean(counts) if counts else None
    rows.append(_row("micro-batches a rank and step, mean", number(batch.get("micro_steps")), mean))
    held = micro_batch_tokens(record.steps, world)
    limit = number(batch.get("max_tokens"))
    rows.append(_row("tokens of a micro-batch, mean", limit, statistics.fmean(held) if held else None))
    rows.append(_row("tokens of a micro-batch, fullest step and rank", limit, max(held, default=None)))
    return rows


def micro_batch_tokens(steps: Sequence[Line], world: int) -> list[float]:
    """Tokens of a micro-batch: for each step and rank the mean over its micro-batches. Empty when not written."""
    found: list[float] = []
    for line in steps:
        micro = number(line.get("micro_steps"))
        if not micro:
            continue
        tokens = known(numbers(part_of(line, "ranks").get("tokens")))
        if not tokens:
            tokens = [r * s / world for r, s in _pairs([line], "tokens_per_s")]
        found += [value / micro for value in tokens]
    return found


def world_size(record: Record) -> int:
    """Ranks of the plan, at least 1."""
    hosts = record.plan.get("hosts")
    slots = (
        [len(host["gpus"]) for host in hosts if isinstance(host, dict) and isinstance(host.get("gpus"), list)]
        if isinstance(hosts, list)
        else []
    )
    return max(1, sum(slots))


def _pairs(steps: Sequence[Line], key: str) -> list[tuple[float, float]]:
    both = [(number(line.get(key)), number(line.get("step_s"))) for line in steps]
    return [(rate, seconds) for rate, seconds in both if rate is not None and seconds is not None]
