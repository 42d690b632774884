"""What became of the jobs of a sweep: read from their run folders, shown in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import ConfigError
from launcher.planning.lines import table
from launcher.reporting.numbers import summarise
from launcher.reporting.record import Record, read_record
from launcher.rundir import RunDir
from launcher.running.causes import signal_name
from launcher.running.journal import last_step, short_path
from launcher.running.state import read_object
from launcher.spec import lower_is_better

# In the order of the table: what can be compared stands first, what needs a look last.
STATUSES = ("done", "running", "waiting", "not started", "stopped", "failed", "invalid")
NUMBERS = {
    "loss": (".4f", "loss, last tenth"),  # of the steps, their mean
    "tokens_per_s": (",.0f", "tokens/s"),
    "queries_per_s": (",.1f", "queries/s"),
    "memory_gib": (".1f", "GiB"),
}
REASON_WIDTH = 100
_CODES = {
    1: "a mistake of the launcher",
    2: "its configuration or data must change",
    3: "something on the machine must be fixed",
    4: "training failed",
}


def read_numbers(run: RunDir, metric: str) -> dict[str, float | None]:
    """The numbers of one job; empty when it never came to a plan."""
    try:
        return numbers_of(read_record(run), metric)
    except ConfigError:
        return {}


def numbers_of(record: Record, metric: str) -> dict[str, float | None]:
    """The best value of `metric`, final loss, steady speed, largest memory, as the report shows them."""
    found = summarise(record, metric)
    return {
        **({} if metric in NUMBERS else {metric: found.best}),
        "loss": found.final_loss,
        "tokens_per_s": found.tokens_per_s,
        "queries_per_s": found.queries_per_s,
        "memory_gib": found.peak_gib,
    }


def read_ending(run: RunDir, code: int) -> tuple[str, str]:
    """(done | stopped | failed, why) of a job whose process ended with `code`; only its own outcome makes it done."""
    try:
        outcome = read_object(run.outcome) or {}
    except ConfigError as error:
        return "failed", error.problems[0].text
    status = outcome.get("status")
    if code < 0:
        return "failed", f"its launching process was killed by {signal_name(-code)}"
    if status == "done" and code == 0:
        return "done", ""
    if status in ("stopped", "interrupted"):
        return "stopped", f"after step {outcome.get('steps')}"
    if code in (130, 143):
        return "stopped", "before it trained"
    if code == 0:
        return "failed", "exit code 0, but it left no outcome"
    first = (outcome.get("first_failure") or {}).get("text")
    return "failed", first or f"{_CODES.get(code, 'it ended early')} (exit code {code}); it said so above"


def result_line(entry: Mapping[str, Any], metric: str) -> str:
    """One job that is over, in one line."""
    found = entry["numbers"]
    names = [*([metric] if metric not in NUMBERS else []), *NUMBERS]
    shown = [_said(name, found[name]) for name in names if found.get(name) is not None]
    swept = " ".join(f"{key}={value}" for key, value in entry["differs"].items())
    head = [f"job {entry['number']}", *([swept] if swept else []), entry["status"]]
    return "  ".join([*head, *shown, duration(entry["seconds"]), *([entry["reason"]] if entry["reason"] else [])])


def _said(name: str, value: float) -> str:
    form, unit = NUMBERS.get(name, (".4f", ""))
    number = format(value, form)
    return f"loss {number} (last tenth)" if name == "loss" else f"{number} {unit}" if unit else f"{name} {number}"


def best_line(data: Mapping[str, Any], folder: RunDir) -> list[str]:
    """The job that is done with the best number; nothing when none has one."""
    metric, best = data["metric"], min(data["jobs"], key=lambda entry: rank(entry, data["metric"]))
    value = best["numbers"].get(metric)
    if best["status"] != "done" or value is None:
        return []
    return [f"  best    {short_path(folder.path / best['folder'])}   ({_said(metric, value)})"]


def result_table(data: Mapping[str, Any], folder: RunDir) -> list[str]:
    """Every job of a sweep.json, the best first, those that failed last."""
    metric, jobs = data["metric"], sorted(data["jobs"], key=lambda entry: rank(entry, data["metric"]))
    swept = list(dict.fromkeys(key for entry in jobs for key in entry["differs"]))
    own = [metric] if metric not in NUMBERS else []
    head = ["job", *swept, "status", *own, *(unit for _, unit in NUMBERS.values()), "time", ""]
    rows = [head, *(_row(entry, swept, own, folder) for entry in jobs)]
    numbers = range(2 + len(swept), len(head) - 1)
    return table(rows, right=(0, *numbers))


def rank(entry: Mapping[str, Any], metric: str) -> tuple[Any, ...]:
    """Place of a job: what is done first, then by its number of `metric`."""
    value = entry["numbers"].get(metric)
    better = 0.0 if value is None else value if lower_is_better(metric) else -value
    return STATUSES.index(entry["status"]), value is None, better, entry["number"]


def _row(entry: Mapping[str, Any], swept: Sequence[str], own: Sequence[str], folder: RunDir) -> list[str]:
    found = entry["numbers"]
    forms = {**dict.fromkeys(own, ".4f"), **{name: form for name, (form, _) in NUMBERS.items()}}
    cells = ["-" if found.get(name) is None else format(found[name], form) for name, form in forms.items()]
    note = entry["reason"]
    if entry["status"] == "running":
        step = last_step(RunDir(folder.path / entry["folder"]))
        note = f"step {step['step']}/{step['total_steps']}" if step else ""
    note = note if len(note) <= REASON_WIDTH else f"{note[: REASON_WIDTH - 3]}..."
    values = [entry["differs"].get(key, "") for key in swept]
    return [str(entry["number"]), *values, entry["status"], *cells, duration(entry["seconds"]), note]


def duration(seconds: float | None) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
