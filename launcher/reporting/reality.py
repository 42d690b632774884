"""The plan beside what happened: memory, time, steps, batch, micro-batches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from launcher.estimates import FRAGMENTS, grows_with_tokens
from launcher.planning.gpus import kind_of
from launcher.reporting import words
from launcher.reporting.foretold import (
    OUTSIDE,
    planned_allocated_gib,
    planned_parts,
    planned_reserved_gib,
    planned_step_s,
    planned_whole_gib,
)
from launcher.reporting.numbers import (
    column,
    data_wait_share,
    gpus,
    peak_gib,
    rank_peaks,
    rate,
    steady_steps,
    with_seconds,
)
from launcher.reporting.record import Record, known, number, numbers, part_of
from launcher.reporting.table import Table
from launcher.running.journal import Line

UNKNOWN = "not known"
SHOWN_RANKS = 64
DATA_WAIT = "waiting for pictures"  # of TimeEstimate.parts


def reality_table(record: Record) -> Table:
    """Planned, seen, and seen divided by planned."""
    rows = [
        *_memory_rows(record),
        *_time_rows(record),
        *_step_rows(record),
        *_batch_rows(record),
    ]
    return Table(
        title="Plan against reality",
        head=("", "planned", "seen", "seen / planned"),
        rows=rows,
        right=(1, 2, 3),
        about="Allocated is what torch's tensors took: the plan without fragmentation and the CUDA context. Reserved "
        "is what torch held: the plan without the context. The driver sees all of it. The plan is for micro-batches "
        "of batch.max_tokens; 'at the tokens seen', parts that grow with tokens are multiplied by (tokens of the "
        "fullest micro-batch) / batch.max_tokens. Share of the limit: the time that the FLOPs of a "
        "step would take at the highest rate that matrix products reach on this kind of GPU / the time the step "
        "took; recomputed layers do not count as work, and what was seen is held against the plan's FLOPs a token. "
        "MFU: the same FLOPs / (time of the step x GPUs x the data sheet's rate of dense 16-bit products).",
    )


def planned_at_tokens_gib(record: Record) -> float | None:
    """What the plan would have been, of torch's tensors, for the fullest micro-batch that was seen."""
    parts, limit, fullest = planned_parts(record.plan), token_limit(record), fullest_tokens(record)
    if not parts or not limit or fullest is None:
        return None
    growing = sum(value for name, value in parts.items() if _grows(name))
    fixed = sum(value for name, value in parts.items() if name not in (*OUTSIDE, FRAGMENTS) and not _grows(name))
    return fixed + growing * fullest / limit


def _grows(part: str) -> bool:
    return grows_with_tokens(part) or part == "vision"  # as earlier plans named it


def token_limit(record: Record) -> float | None:
    """batch.max_tokens as planned."""
    return number(part_of(record.plan, "batch").get("max_tokens"))


def fullest_tokens(record: Record) -> float | None:
    """Tokens of the fullest micro-batch; of runs that did not note it the mean of the fullest step and rank."""
    noted = [known(numbers(part_of(line, "ranks").get("fullest_tokens"))) for line in record.steps]
    found = [tokens for ranks in noted for tokens in ranks]
    return max(found or micro_batch_tokens(record.steps, world_size(record)), default=None)


def planned_time(record: Record) -> tuple[float, dict[str, float]] | None:
    """Seconds of a step as planned, and by part; None of a plan without (a CPU's has none)."""
    step, parts = planned_step_s(record.plan), part_of(record.plan, "time", "parts")
    return None if step is None else (step, {name: number(value) or 0.0 for name, value in parts.items()})


def limit_share(record: Record) -> tuple[float | None, float | None]:
    """Share of the limit as planned and as achieved: see the table's words."""
    time = part_of(record.plan, "time")
    step, least, tokens = (number(time.get(key)) for key in ("step_s", "least_s", "tokens_per_s"))
    if not step or least is None or not tokens:
        return None, None
    seen = rate(steady_steps(record), "tokens_per_s")
    return least / step, None if seen is None else least / step * seen / tokens


def utilisation(record: Record) -> tuple[float | None, float | None]:
    """MFU as planned and as achieved; None where the data sheet of the GPU is not known."""
    time, kind = part_of(record.plan, "time"), kind_of(str(record.plan.get("gpu_kind")))
    flops, least = number(time.get("flops")), number(time.get("least_s"))
    if kind is None or flops is None or not least:
        return None, None
    # What the limit's rate is of the data sheet's: the share of the limit times this is the share of the data sheet.
    of_peak = flops / least / (world_size(record) * kind.peak_tflops * 1e12)
    planned, seen = limit_share(record)
    return None if planned is None else of_peak * planned, None if seen is None else of_peak * seen


def mean_step_s(record: Record) -> float | None:
    """Mean time of a step, the first ones after a start left out."""
    times = known(column(steady_steps(record), "step_s"))
    return statistics.fmean(times) if times else None


def _row(
    name: str,
    planned: float | None,
    seen: float | None,
    show: Callable[[float | None], str] = words.count,
) -> list[str]:
    ratio = seen / planned if planned and seen is not None else None
    return [name, UNKNOWN if planned is None else show(planned), show(seen), words.plain(ratio, ".2f")]


def _limit_row(name: str, limit: float | None, seen: float | None) -> list[str]:
    """A row whose plan is no aim: more never comes, less is no fault."""
    share = f"{words.percent(seen / limit)} of the limit" if limit and seen is not None else words.NONE
    return [name, UNKNOWN if limit is None else f"at most {words.count(limit)}", words.count(seen), share]


def _memory_rows(record: Record) -> list[list[str]]:
    plan = record.plan
    inside, held, whole = planned_allocated_gib(plan), planned_reserved_gib(plan), planned_whole_gib(plan)
    peaks = rank_peaks(record.steps)
    rows = [
        _row(f"peak allocated, rank {rank}", inside, peak, words.gib)
        for rank, peak in list(peaks.items())[:SHOWN_RANKS]
    ]
    largest = peak_gib(record.steps)
    if not peaks and largest is not None:
        rows.append(_row("peak allocated, largest rank", inside, largest, words.gib))
    at_tokens = planned_at_tokens_gib(record)
    if largest is not None and at_tokens is not None:
        rows.append(_row("peak allocated against the plan at the tokens seen", at_tokens, largest, words.gib))
    reserved = peak_gib(record.steps, "memory_reserved_gib")
    if reserved is not None:
        rows.append(_row("peak reserved, largest rank", held, reserved, words.gib))
    if moment := _fullest_moment(record):
        rows.append(["the fullest moment", str(plan.get("memory_moment") or UNKNOWN), moment, words.NONE])
    for name, peak in list(driver_peaks(record).items())[:SHOWN_RANKS]:
        rows.append(_row(f"in use on {name} (driver)", whole, peak, words.gib))
    if not rows:
        name, planned, seen, ratio = _row("memory of one rank, estimated", whole, None, words.gib)
        rows.append([name, planned, "not measured on a CPU" if record.plan.get("device") == "cpu" else seen, ratio])
    return rows


def _time_rows(record: Record) -> list[list[str]]:
    """Nothing where the plan foretells no time."""
    planned = planned_time(record)
    if planned is None:
        return []
    time, steady = part_of(record.plan, "time"), steady_steps(record)
    shares, used = limit_share(record), utilisation(record)
    waits = planned[1].get(DATA_WAIT, 0.0) / planned[0]
    return [
        _row("time of a step, mean", planned[0], mean_step_s(record), words.seconds),
        *(
            _row(name, number(time.get(key)), rate(steady, key))
            for key, name in (("tokens_per_s", "tokens/s"), ("queries_per_s", "queries/s"))
        ),
        _row("share of the limit", *shares, words.percent),
        *([] if used[0] is None else [_row("MFU", *used, words.percent)]),
        _row("share of waiting for data", waits, data_wait_share(steady), words.percent),
    ]


def _fullest_moment(record: Record) -> str | None:
    """In which part of a step, or before the first one, the largest rank took most; None when not written."""
    told = [line.get("memory_moment") for line in record.steps]
    return next((str(moment) for moment in reversed(told) if moment is not None), None)


def driver_peaks(record: Record) -> dict[str, float]:
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
    rows.append(_limit_row("tokens of the fullest micro-batch", limit, fullest_tokens(record)))
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
