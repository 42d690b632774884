"""The plan beside what happened: memory, steps, batch, micro-batches."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from launcher.reporting import words
from launcher.reporting.numbers import column, gpus, peak_gib, rank_peaks, with_seconds
from launcher.reporting.record import Record, known, number, numbers, part_of
from launcher.reporting.table import Table
from launcher.running.journal import Line

UNKNOWN = "not known"
SHOWN_RANKS = 64
BYTES_A_GIB = 2**30
BY_TOKENS = ("activations", "vision")  # parts of the plan that grow with the tokens of a micro-batch


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
        "torch; what the driver reports, against all of it. The plan is for micro-batches of batch.max_tokens; 'at "
        "the tokens seen', its parts 'activations' and 'vision' are multiplied by (tokens of a micro-batch, fullest "
        "step and rank) / batch.max_tokens, the other parts stay.",
    )


def planned_gib(record: Record, *, context: bool = False) -> float | None:
    """The plan's estimate for one GPU or rank, with or without what lies outside torch's allocator."""
    parts = _planned_parts(record)
    return sum(value for name, value in parts.items() if context or name != "context") if parts else None


def planned_at_tokens_gib(record: Record) -> float | None:
    """What the plan would have been, outside `context`, for the fullest micro-batch that was seen."""
    parts, limit, fullest = _planned_parts(record), token_limit(record), fullest_tokens(record)
    if not parts or not limit or fullest is None:
        return None
    growing = sum(parts.pop(name, 0.0) for name in BY_TOKENS)
    return sum(value for name, value in parts.items() if name != "context") + growing * fullest / limit


def token_limit(record: Record) -> float | None:
    """batch.max_tokens as planned."""
    return number(part_of(record.plan, "batch").get("max_tokens"))


def fullest_tokens(record: Record) -> float | None:
    """Tokens of a micro-batch in the fullest step and rank; its mean where a step has several micro-batches."""
    return max(micro_batch_tokens(record.steps, world_size(record)), default=None)


def _planned_parts(record: Record) -> dict[str, float]:
    return {name: (number(value) or 0.0) / BYTES_A_GIB for name, value in part_of(record.plan, "memory").items()}


def _row(name: str, planned: float | None, seen: float | None, unit: str = "") -> list[str]:
    shown = [words.gib(value) if unit == "GiB" else words.count(value) for value in (planned, seen)]
    ratio = seen / planned if planned and seen is not None else None
    return [name, UNKNOWN if planned is None else shown[0], shown[1], words.plain(ratio, ".2f")]


def _limit_row(name: str, limit: float | None, seen: float | None) -> list[str]:
    """A row whose plan is no aim: more never comes, less is no fault."""
    share = f"{words.percent(seen / limit)} of the limit" if limit and seen is not None else words.NONE
    return [name, UNKNOWN if limit is None else f"at most {words.count(limit)}", words.count(seen), share]


def _memory_rows(record: Record) -> list[list[str]]:
    inside, whole = planned_gib(record), planned_gib(record, context=True)
    peaks = rank_peaks(record.steps)
    rows = [
        _row(f"peak allocated, rank {rank}", inside, peak, "GiB") for rank, peak in list(peaks.items())[:SHOWN_RANKS]
    ]
    largest = peak_gib(record.steps)
    if not peaks and largest is not None:
        rows.append(_row("peak allocated, largest rank", inside, largest, "GiB"))
    at_tokens = planned_at_tokens_gib(record)
    if largest is not None and at_tokens is not None:
        rows.append(_row("peak allocated against the plan at the tokens seen", at_tokens, largest, "GiB"))
    reserved = peak_gib(record.steps, "memory_reserved_gib")
    if reserved is not None:
        rows.append(_row("peak reserved, largest rank", inside, reserved, "GiB"))
    for name, peak in list(_driver_peaks(record).items())[:SHOWN_RANKS]:
        rows.append(_row(f"in use on {name} (driver)", whole, peak, "GiB"))
    if not rows:
        name, planned, seen, ratio = _row("memory of one rank, estimated", whole, None, "GiB")
        rows.append([name, planned, "not measured on a CPU" if record.plan.get("device") == "cpu" else seen, ratio])
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
    queries = [q * s for q, s in with_seconds(record.steps, "queries_per_s")]
    rows = [
        _row("queries a step, mean", number(batch.get("global_size")), statistics.fmean(queries) if queries else None)
    ]
    counts = known(column(record.steps, "micro_steps"))
    mean = statistics.fmean(counts) if counts else None
    rows.append(_row("micro-batches a rank and step, mean", number(batch.get("micro_steps")), mean))
    held = micro_batch_tokens(record.steps, world)
    limit = token_limit(record)
    rows.append(_limit_row("tokens of a micro-batch, mean", limit, statistics.fmean(held) if held else None))
    rows.append(_limit_row("tokens of a micro-batch, fullest step and rank", limit, fullest_tokens(record)))
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
            tokens = [r * s / world for r, s in with_seconds([line], "tokens_per_s")]
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
