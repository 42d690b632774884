"""What tests/bench/scaling.py keeps of every run, one JSON line each, and the table of many.

rate    tokens/s or groups/s of all GPUs; goal  what is wanted of it; planned  what the plan says
eff.    rate a GPU beside that of the same work on its fewest GPUs; aim  what is wanted of it; told  of planned rates
step s  median of steps after the first ones; over  how much longer than planned
GiB     held by torch, the fullest rank; more  peak of tensors over the plan for micro-batches as full as those seen
first s from the command to the end of the first step; save s  that a checkpoint stops training for
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from launcher.reporting.foretold import planned_reserved_gib, planned_step_s
from launcher.reporting.numbers import data_wait_share, peak_gib
from launcher.reporting.reality import planned_at_tokens_gib
from launcher.reporting.record import Record, number, part_of
from tests.bench.scaling_works import Work
from tests.bench.steady import steady

LEAST = 3  # steps, or the first one would count, in which kernels are compiled
FORETOLD, LINKS = "foretold", "all-gather"
RATES = {"groups": "queries_per_s", "tokens": "tokens_per_s"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One work on a number of GPUs; what is not known is None."""

    work: str
    gpus: int
    unit: str
    rows: int  # a GPU and step
    status: str  # done | skipped | left out | foretold | how it failed
    note: str = ""
    zero: str = ""
    max_tokens: int | None = None
    recomputed: int | None = None  # layers
    planned_rate: float | None = None
    planned_step_s: float | None = None
    planned_gib: float | None = None  # held by torch
    rate: float | None = None
    step_s: tuple[float, ...] = ()
    reserved_gib: float | None = None
    tensors_gib: float | None = None
    planned_tensors_gib: float | None = None  # for micro-batches as full as those seen
    first_step_s: float | None = None
    save_s: float | None = None
    wait_share: float | None = None
    versions: str = ""

    @property
    def seconds(self) -> float | None:
        """Of a step."""
        return median(steady(self.step_s)) if len(self.step_s) >= LEAST else None


def bare(work: Work, gpus: int, status: str, note: str) -> Outcome:
    """One without any figure."""
    return Outcome(work=work.name, gpus=gpus, unit=work.unit, rows=work.rows, status=status, note=note)


def planned(work: Work, gpus: int, zero: str, plan: dict[str, Any], status: str = FORETOLD) -> Outcome:
    """What a plan says."""
    return replace(
        bare(work, gpus, status, ""),
        zero=zero,
        max_tokens=plan["batch"]["max_tokens"],
        recomputed=plan["checkpointed_layers"],
        planned_rate=number(part_of(plan, "time").get(RATES[work.unit])),
        planned_step_s=planned_step_s(plan),
        planned_gib=planned_reserved_gib(plan),
    )


def measured(work: Work, gpus: int, zero: str, record: Record, begun: float) -> Outcome:
    """What a run folder says, of a run that failed too; `begun`: time of the command."""
    steps = record.steps
    rates = [value for line in steady(steps) if (value := number(line.get(RATES[work.unit]))) is not None]
    failure = part_of(record.outcome or {}, "first_failure").get("text")
    return replace(
        planned(work, gpus, zero, record.plan, status=record.state),
        note="" if record.state == "done" else str(failure or record.text),
        rate=median(rates) if rates and len(steps) >= LEAST else None,
        step_s=tuple(line["step_s"] for line in steps),
        reserved_gib=peak_gib(steps, "memory_reserved_gib"),
        tensors_gib=peak_gib(steps),
        planned_tensors_gib=planned_at_tokens_gib(record),
        first_step_s=steps[0]["time"] - begun if steps else None,
        save_s=save_s(record.events),
        wait_share=data_wait_share(steady(steps)),
        versions=_versions(record),
    )


def save_s(events: Sequence[dict[str, Any]]) -> float | None:
    """Seconds from the beginning of the last checkpoint to what came next; None without one.

    Example:
        >>> save_s([{"phase": "saving", "time": 5.0}, {"step": 4, "time": 6.9}, {"phase": "training", "time": 7.0}])
        2.0
    """
    phases = [event for event in events if "phase" in event]
    spans = [(one, after) for one, after in zip(phases, phases[1:], strict=False) if one["phase"] == "saving"]
    return spans[-1][1]["time"] - spans[-1][0]["time"] if spans else None


def _versions(record: Record) -> str:
    file = record.run.environment
    found = json.loads(file.read_text()) if file.is_file() else {}
    names = ("torch", "transformers", "deepspeed", "triton")
    kind = str(record.plan.get("gpu_kind") or record.plan.get("device"))
    return ", ".join([kind, *(f"{name} {found[name]}" for name in names if found.get(name))])


def read(places: Iterable[Path]) -> tuple[list[Outcome], dict[int, dict[str, float]]]:
    """Outcomes and, by number of GPUs, GB/s of all-gathers, of files or of folders' outcomes.jsonl and foretold.jsonl.

    A run that was made again replaces the earlier one, one that came to no step does not.
    """
    found: dict[tuple[str, int, bool], Outcome] = {}
    links: dict[int, dict[str, float]] = {}
    for line in _lines(places):
        if line["work"] == LINKS:
            links[line["gpus"]] = line["gbs"]
            continue
        outcome = Outcome(**line | {"step_s": tuple(line["step_s"])})
        key = (outcome.work, outcome.gpus, outcome.status == FORETOLD)
        if outcome.rate is not None or key not in found or found[key].rate is None:
            found[key] = outcome
    return list(found.values()), links


def _lines(places: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for place in places:
        files = [place / f"{name}.jsonl" for name in (FORETOLD, "outcomes")] if place.is_dir() else [place]
        for file in files:
            yield from map(json.loads, file.read_text().splitlines() if file.is_file() else ())


def efficiencies(outcomes: Iterable[Outcome], rate: Callable[[Outcome], float | None]) -> dict[tuple[str, int], float]:
    """(work, GPUs) -> rate a GPU beside that of the fewest GPUs, which have as many rows each."""
    each = {(o.work, o.gpus): (o.rows, value / o.gpus) for o in outcomes if (value := rate(o)) is not None}
    found = {}
    for (work, gpus), (rows, value) in each.items():
        fewest = min(other for name, other in each if name == work and each[name, other][0] == rows)
        found[work, gpus] = value / each[work, fewest][1]
    return found


def shown(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """One of each work and number of GPUs, in order: what was foretold gives way to what came of it."""
    order = list(dict.fromkeys(o.work for o in outcomes))
    run = {(o.work, o.gpus) for o in outcomes if o.status != FORETOLD}
    kept = [o for o in outcomes if o.status != FORETOLD or (o.work, o.gpus) not in run]
    return sorted(kept, key=lambda o: (order.index(o.work), o.gpus))


def table(
    outcomes: Sequence[Outcome],
    links: dict[int, dict[str, float]],
    works: Iterable[Work],
    only: Sequence[Outcome] | None = None,
) -> str:
    """Aligned columns, with values that not all lack; under them all-gathers, and what was not run.

    `only`: the lines that are shown, by default one of each work and number of GPUs.
    """
    lines_of = shown(outcomes) if only is None else only
    of_name = {work.name: work for work in works}
    real = efficiencies(outcomes, lambda o: o.rate)
    told = efficiencies(sorted(outcomes, key=lambda o: o.status != FORETOLD), lambda o: o.planned_rate)
    rows: list[tuple[str, ...]] = [HEADS]
    for o in lines_of:
        key = (o.work, o.gpus)
        rows.append(_cells(o, real.get(key) if o.rate else None, told.get(key), of_name.get(o.work)))
    lines = _aligned([column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}])
    for gpus, rates in sorted(links.items()):
        sizes = ", ".join(f"{value:,.0f} at {size} MiB" for size, value in rates.items())
        lines.append(f"all-gather on {gpus} GPUs, bus bandwidth, GB/s: {sizes}")
    lines += [f"{o.work}, {o.gpus} GPUs: {o.status}: {o.note}" for o in lines_of if o.note]
    return "\n".join([*lines, *sorted({o.versions for o in lines_of if o.versions})])


def _aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Lines; names stand left, numbers right."""
    widths = [max(map(len, column)) for column in columns]
    return [
        f"{row[0]:{widths[0]}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in zip(*columns, strict=True)
    ]


HEADS = (
    *("work", "GPUs", "rows", "ZeRO", "tokens", "again", "a second", "rate", "goal", "planned"),
    *("eff.", "aim", "told", "step s", "planned s", "over", "GiB", "planned GiB", "more", "first s", "save s", "waits"),
)


def _cells(o: Outcome, real: float | None, told: float | None, work: Work | None) -> tuple[str, ...]:
    """A line of the table."""
    decimals = ",.0f" if o.unit == "tokens" else ".2f"
    goal, aim = (work.goals.get(o.gpus), work.scales) if work else (None, None)
    return (
        *(o.work, f"{o.gpus}", f"{o.rows}", o.zero or "-", _text(o.max_tokens, ",d"), _text(o.recomputed, "d")),
        *(o.unit, _text(o.rate, decimals), _text(goal, decimals), _text(o.planned_rate, decimals)),
        *(_text(real, ".1%"), _text(aim if real is not None else None, ".0%"), _text(told, ".1%")),
        *(_text(o.seconds, ".2f"), _text(o.planned_step_s, ".2f"), _text(_over(o.seconds, o.planned_step_s), "+.1%")),
        *(_text(o.reserved_gib, ".1f"), _text(o.planned_gib, ".1f")),
        *(_text(_over(o.tensors_gib, o.planned_tensors_gib), "+.1%"), _text(o.first_step_s, ".1f")),
        *(_text(o.save_s, ".2f"), _text(o.wait_share, ".1%")),
    )


def _over(seen: float | None, plan: float | None) -> float | None:
    """How much more was seen than planned, as a share."""
    return seen / plan - 1 if seen is not None and plan else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
