"""The few numbers that say how a run did, computed from its record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.reporting.record import Record, known, number, numbers, part_of
from launcher.running.journal import Line, best_of, eval_scores
from launcher.spec import metric_of

WARM_STEPS = 5  # after each start kernels are chosen and memory grows: those steps say nothing of the speed
PARTS = ("data_wait_s", "forward_s", "backward_s", "optimizer_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Key numbers; None is not known."""

    steps: int
    total_steps: int | None
    metric: str
    before: float | None
    best: float | None
    best_step: int | None
    after: float | None
    final_loss: float | None
    queries_per_s: float | None
    tokens_per_s: float | None
    step_s: float | None  # median
    step_low_s: float | None  # 10 % of steps take less
    step_high_s: float | None  # 10 % of steps take more
    data_wait: float | None  # share of the steps' time
    peak_gib: float | None  # largest allocated over ranks
    host_gib: float | None  # most in use on any host, by everything that runs there
    gpu_util: float | None  # 0 to 1, mean over GPUs while training


def summarise(record: Record, metric: str | None = None) -> Summary:
    """Compute them all; `metric` is the evaluation metric to tell of, by default the run's own."""
    steady = steady_steps(record)
    times = known(number(line.get("step_s")) for line in steady)
    metric = metric or own_metric(record)
    best = best_eval(record, metric)
    total = number(record.steps[-1].get("total_steps")) if record.steps else None
    return Summary(
        steps=record.steps[-1]["step"] if record.steps else 0,
        total_steps=None if total is None else int(total),
        metric=metric,
        before=_score(record.evals[0], metric) if record.evals and record.evals[0]["step"] == 0 else None,
        best=_score(best, metric) if best else None,
        best_step=best["step"] if best else None,
        after=_score(record.evals[-1], metric) if record.evals and record.evals[-1]["step"] > 0 else None,
        final_loss=final_loss(record.steps),
        queries_per_s=rate(steady, "queries_per_s"),
        tokens_per_s=rate(steady, "tokens_per_s"),
        step_s=quantile(times, 0.5),
        step_low_s=quantile(times, 0.1),
        step_high_s=quantile(times, 0.9),
        data_wait=data_wait_share(steady),
        peak_gib=peak_gib(record.steps),
        host_gib=max(known(number(part_of(line, "memory").get("used_gib")) for line in record.monitor), default=None),
        gpu_util=gpu_util(record),
    )


def own_metric(record: Record) -> str:
    """The evaluation metric that decides in this run."""
    return metric_of(record.config)


def steady_steps(record: Record) -> list[Line]:
    """Steps without the first five after each start; all of them when that leaves few."""
    kept = []
    in_part: dict[int, int] = {}
    for line in record.steps:
        moment = line["time"]
        part = sum(moment >= p.start for p in record.parts)
        in_part[part] = in_part.get(part, 0) + 1
        if in_part[part] > WARM_STEPS:
            kept.append(line)
    return kept if len(kept) >= WARM_STEPS else record.steps


def column(lines: Sequence[Line], key: str) -> list[float | None]:
    """One value a line, None where it is missing."""
    return [number(entry.get(key)) for entry in lines]


def rate(steps: Sequence[Line], key: str) -> float | None:
    """All that was done divided by all the time it took: not the mean of the steps' rates."""
    usable = with_seconds(steps, key)
    return sum(r * s for r, s in usable) / sum(s for _, s in usable) if usable else None


def with_seconds(steps: Sequence[Line], key: str) -> list[tuple[float, float]]:
    """A value of each step and the seconds that the step took, where both are known."""
    pairs = [(number(line.get(key)), number(line.get("step_s"))) for line in steps]
    return [(value, seconds) for value, seconds in pairs if value is not None and seconds is not None and seconds > 0]


def data_wait_share(steps: Sequence[Line]) -> float | None:
    """Share of the steps' time in which the slowest rank waited for its data."""
    usable = with_seconds(steps, "data_wait_s")
    return sum(wait for wait, _ in usable) / sum(s for _, s in usable) if usable else None


def peak_gib(steps: Sequence[Line], key: str = "memory_gib") -> float | None:
    """The largest value of any step."""
    return max(known(number(line.get(key)) for line in steps), default=None)


def rank_peaks(steps: Sequence[Line], key: str = "memory_gib") -> dict[int, float]:
    """Largest memory allocated on each rank (reserved: `memory_reserved_gib`), GiB."""
    peaks: dict[int, float] = {}
    for line in steps:
        for rank, value in enumerate(numbers(part_of(line, "ranks").get(key))):
            if value is not None:
                peaks[rank] = max(value, peaks.get(rank, 0.0))
    return peaks


def gpu_util(record: Record) -> float | None:
    """Mean GPU utilisation over GPUs and looks between the first and the last step."""
    if len(record.steps) < 2:
        return None
    begin, end = record.steps[0]["time"], record.steps[-1]["time"]
    looks = [line for line in record.monitor if begin <= line["time"] <= end]
    values = known(number(gpu.get("util_percent")) for line in looks for gpu in gpus(line))
    return statistics.fmean(values) / 100 if values else None


def gpus(line: Line) -> list[Line]:
    """The GPUs of one look of the monitor."""
    found = line.get("gpus")
    return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []


def best_eval(record: Record, metric: str) -> Line | None:
    """The trained evaluation with the best metric."""
    return best_of([line for line in record.evals if line["step"] > 0], metric)


def final_loss(steps: Sequence[Line]) -> float | None:
    """Mean loss of the last tenth of the steps, at most 50: one step alone is noise."""
    count = max(1, min(50, len(steps) // 10))
    values = known(number(line.get("loss")) for line in steps[-count:])
    return statistics.fmean(values) if values else None


def lost_losses(steps: Sequence[Line]) -> list[int]:
    """Steps whose loss was not a finite number."""
    return [line["step"] for line in steps if number(line.get("loss")) is None]


def quantile(values: Sequence[float], share: float) -> float | None:
    """Value below which `share` of them lie, between neighbours by a straight line."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _score(line: Line, metric: str) -> float | None:
    return number(eval_scores(line).get(metric.removeprefix("eval/")))
