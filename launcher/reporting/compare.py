"""Several runs on one page: what differs between them, how they did, and their curves over each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launcher.errors import ConfigError, Problem
from launcher.planning.secrets import MASK, is_secret
from launcher.reporting import words
from launcher.reporting.chart import RATE, STEP, Chart, Row, Switch, Value, color, dash, figure, line, smooth
from launcher.reporting.foretold import planned_allocated_gib, planned_step_s
from launcher.reporting.numbers import Summary, column, own_metric, summarise
from launcher.reporting.page import is_own_page, render, without_data
from launcher.reporting.record import Record, flat, known, number, read_record
from launcher.reporting.swept import swept_charts
from launcher.reporting.table import Table
from launcher.rundir import SWEEP, RunDir, read_json, write_atomic
from launcher.running.journal import Line, eval_scores
from launcher.running.results import NUMBERS, STATUSES, numbers_of, rank
from launcher.spec import lower_is_better

NOT_ASKED = ("run.", "model.arch.", "resume", "sweep.")  # where a run lives, and what follows from another key
NO_MEMORY = "None of these runs measured it (a CPU has none)."
LOW, HIGH = min, max
PLANNED = "as planned"  # a column beside what was seen, left out where no plan foretells it


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a page of several runs shows."""

    title: str
    records: Sequence[Record]
    names: Sequence[str]  # of the runs, in the same order
    metric: str  # the evaluation metric that is shown of all of them
    notes: Sequence[str] = ()
    pages: Mapping[int, str] = field(default_factory=dict)  # run -> its own page, seen from this one
    charts: Sequence[Chart] = ()  # before the curves


def compare_runs(runs: Sequence[RunDir]) -> Comparison:
    """Read runs to be shown beside each other. Raises ConfigError when one cannot be read."""
    records = [read_record(run) for run in runs]
    metrics = list(dict.fromkeys(own_metric(record) for record in records))
    notes = [f"The runs have different eval.metric: {', '.join(metrics)}."] if len(metrics) > 1 else []
    names = _told_apart(records)
    title = " against ".join(names) if len(names) < 4 else f"{len(names)} runs"
    return Comparison(title=title, records=records, names=names, metric=metrics[0], notes=notes)


def compare_jobs(folder: Path) -> Comparison:
    """Read the jobs of a sweep, the best first. Raises ConfigError when none of them has started."""
    sweep = _sweep(folder)
    asked = str(sweep.get("metric"))
    found, notes = [], []
    for entry in sweep["jobs"]:
        try:
            record = read_record(RunDir(folder / entry["folder"]))
        except ConfigError:
            reason = entry.get("reason")
            notes.append(f"Job {_job_name(entry)} is not shown: {entry['status']}{f', {reason}' if reason else ''}.")
            continue
        found.append(({**entry, "numbers": numbers_of(record, asked)}, record))
    if not found:
        text = f"{folder}: no job of this sweep has started"
        raise ConfigError(Problem(text, tries=("python -m launcher status",)), title="with this sweep")
    found.sort(key=lambda pair: rank(pair[0], asked))
    jobs, records = [job for job, _ in found], [record for _, record in found]
    metric = asked.removeprefix("eval/")
    scored = asked not in NUMBERS and any(metric in eval_scores(entry) for record in records for entry in record.evals)
    return Comparison(
        title=f"Sweep {folder.resolve().name}",
        records=records,
        names=[_job_name(job) for job in jobs],
        metric=metric if scored else own_metric(records[0]),
        notes=notes,
        pages={
            row: f"{quote(jobs[row]['folder'])}/report.html" for row, r in enumerate(records) if r.run.report.is_file()
        },
        charts=swept_charts(jobs, asked),
    )


def _job_name(entry: Line) -> str:
    swept = " ".join(f"{key}={value}" for key, value in entry["differs"].items())
    return f"{entry['number']}: {swept}" if swept else f"job {entry['number']}"


def write_sweep_report(folder: RunDir) -> Path:
    """Write `report.html` of a sweep, over its jobs, and return its path."""
    write_atomic(folder.report, comparison_page(compare_jobs(folder.path)))
    return folder.report


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the page. Raises ConfigError rather than replace a file that is no such page."""
    if path.exists() and not (path.is_file() and is_own_page(path)):
        text = f"{path} exists and was not written by `report`: it is not replaced"
        raise ConfigError(Problem(text, tries=("-o ANOTHER.html",)), title="with this report")
    write_atomic(path, comparison_page(comparison))


def comparison_page(comparison: Comparison) -> str:
    """The page of several runs."""
    charts = [*comparison.charts, *comparison_charts(comparison)]
    tables = [results_table(comparison), differences_table(comparison)]
    return render(
        "compare.html",
        charts,
        title=comparison.title,
        notes=comparison.notes,
        tables=tables,
        absent=without_data(charts, tables),
    )


def results_table(comparison: Comparison) -> Table:
    """How each run did, the best value of each column marked."""
    direction = LOW if lower_is_better(comparison.metric) else HIGH
    # Name, value, its words, and which end is better.
    columns: tuple[tuple[str, Callable[[Record, Summary], Value], Callable[[Value], str], object], ...] = (
        ("steps", lambda _, s: s.steps, words.count, None),
        (f"best {comparison.metric}", lambda _, s: s.best, lambda value: words.plain(value, ".4f"), direction),
        ("loss, last tenth", lambda _, s: s.final_loss, words.loss, LOW),
        ("queries/s", lambda _, s: s.queries_per_s, words.count, HIGH),
        ("tokens/s", lambda _, s: s.tokens_per_s, words.count, HIGH),
        ("step time", lambda _, s: s.step_s, words.seconds, LOW),
        (PLANNED, lambda record, _: planned_step_s(record.plan), words.seconds, None),
        ("peak memory", lambda _, s: s.peak_gib, words.gib, LOW),
        (PLANNED, lambda r, s: None if s.peak_gib is None else planned_allocated_gib(r.plan), words.gib, None),
        ("duration", lambda record, _: record.seconds, words.duration, None),
    )
    pairs = [(record, summarise(record, comparison.metric)) for record in comparison.records]
    columns = tuple(c for c in columns if c[0] != PLANNED or known(c[1](*pair) for pair in pairs))
    rows = [[name, record.state] for name, record in zip(comparison.names, comparison.records, strict=True)]
    best = []
    for index, (_, value, show, better) in enumerate(columns, start=2):
        values = [value(record, summary) for record, summary in pairs]
        for row, entry in zip(rows, values, strict=True):
            row.append(show(entry))
        if better and len(set(known(values))) > 1:
            winner = max(known(values)) if better is HIGH else min(known(values))
            best += [(row_number, index) for row_number, entry in enumerate(values) if entry == winner]
    return Table(
        title="Results",
        head=("run", "state", *(name for name, *_ in columns)),
        rows=rows,
        right=tuple(range(2, 2 + len(columns))),
        best=best,
        links=comparison.pages,
        about="Speeds leave out the first steps after a start; the loss is the mean of the last tenth of the steps, "
        "at most 50.",
    )


def differences_table(comparison: Comparison) -> Table:
    """Keys whose values are not the same in all runs; secrets masked."""
    configs = [flat(record.config) for record in comparison.records]
    rows = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key, words.NONE) for config in configs]
        if len(set(values)) > 1 and not key.startswith(NOT_ASKED):
            variable = key.removeprefix("env.set.")
            hidden = variable != key and any(is_secret(variable, value) for value in values)
            rows.append([key, *(MASK if hidden else value for value in values)])
    why = "nothing, all of them have the same configuration."
    return Table(title="What differs", head=("key", *comparison.names), rows=rows, why=why)


Curve = Callable[[Record], tuple[Sequence[Line], list[Value]]]  # the lines and the value of each


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """Curves over each other, by step and by time."""
    metric = comparison.metric

    def of_steps(key: str) -> Curve:
        return lambda record: (record.steps, column(record.steps, key))

    def smoothed(key: str) -> Curve:
        return lambda record: (record.steps, smooth(column(record.steps, key)))

    def scores(record: Record) -> tuple[Sequence[Line], list[Value]]:
        return record.evals, [number(eval_scores(entry).get(metric)) for entry in record.evals]

    return [
        _overlay("loss", "Loss, smoothed", comparison, smoothed("loss"), ".4f", wide=True),
        _overlay("eval", f"Evaluation: {metric}", comparison, scores, ".4f", mode="lines+markers"),
        _overlay("memory", "Peak GPU memory, GiB", comparison, of_steps("memory_gib"), ".2f", why=NO_MEMORY),
        _overlay("queries", "Queries/s, smoothed", comparison, smoothed("queries_per_s"), RATE),
        _overlay("tokens", "Tokens/s, smoothed", comparison, smoothed("tokens_per_s"), RATE),
    ]


def _overlay(
    id_: str,
    title: str,
    comparison: Comparison,
    curve: Curve,
    form: str,
    *,
    mode: str = "lines",
    wide: bool = False,
    why: str = "None of these runs has written it down.",
) -> Chart:
    by_step, by_time = [], []
    for index, (name, record) in enumerate(zip(comparison.names, comparison.records, strict=True)):
        lines, ys = curve(record)
        if known(ys):
            style: dict[str, Any] = {"form": form, "dash": dash(index), "beside": len(comparison.names)}
            style["mode"] = mode if len(ys) > 1 else "markers"
            by_step.append(line(name, [entry["step"] for entry in lines], ys, color(index), **style))
            minutes = [record.minutes(entry["time"]) for entry in lines]
            by_time.append(line(name, minutes, ys, color(index), visible=False, **style))
    if not by_step:
        return Chart(id=id_, title=title, why=why)
    row = Row(title="", traces=[*by_step, *by_time])
    steps, times = [True] * len(by_step), [False] * len(by_step)
    shown = figure([row], STEP, row_px=360 if wide else 300)
    ticks = "linear" if "dtick" in shown["layout"]["xaxis"] else "auto"
    switches = (
        _axis("by step", STEP, [*steps, *times], ticks),
        _axis("by time", "minutes of running", [*times, *steps], "auto"),
    )
    return Chart(id=id_, title=title, figure=shown, switches=switches, wide=wide)


def _axis(name: str, title: str, visible: Sequence[bool], ticks: str) -> Switch:
    layout = {"xaxis.title.text": title, "xaxis.autorange": True, "xaxis.tickmode": ticks}
    return Switch(label=name, visible=visible, layout=layout)


def _told_apart(records: Sequence[Record]) -> list[str]:
    names = [record.name for record in records]
    if len(set(names)) == len(names):
        return names
    return [str(record.run.path) for record in records]


def _sweep(folder: Path) -> Line:
    """What sweep.json holds. Raises ConfigError when that is not what a sweep writes."""
    path = folder / SWEEP
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(f"{path} cannot be read: {error}"), title="with this sweep") from None
    jobs = found.get("jobs") if isinstance(found, dict) else None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) and _is_job(job) for job in jobs):
        raise ConfigError(Problem(f"{path} is damaged, or of another version"), title="with this sweep")
    return dict(found)


def _is_job(entry: Line) -> bool:
    kinds = {"number": int, "folder": str, "differs": dict}
    return all(isinstance(entry.get(key), kind) for key, kind in kinds.items()) and entry.get("status") in STATUSES
