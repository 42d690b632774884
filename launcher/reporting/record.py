"""Reads everything that a run has left in its folder, whole or damaged, into one value."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.plain import from_data
from launcher.rundir import RunDir
from launcher.running.journal import JsonTail, Line, inside, rank_statuses, read_quietly
from launcher.running.state import GOES_ON, find_state, read_object, run_name
from launcher.spec import RunPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One start of the run until its end; a run that was resumed has several."""

    start: float  # seconds since the epoch, as all times here
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is known of one run. Lines are those that count: steps taken again replace what came before."""

    run: RunDir
    plan: Line
    state: str  # running | ending | lost | unknown, or the outcome's status
    text: str  # the state as a sentence
    outcome: Line | None
    parts: tuple[Part, ...]
    steps: list[Line]
    evals: list[Line]
    events: list[Line]
    monitor: list[Line]
    statuses: dict[int, Line]
    notes: tuple[str, ...]  # what could not be read

    @property
    def name(self) -> str:
        """Of the run folder; a job has its sweep's before its own."""
        return run_name(RunDir(self.run.path.resolve()))

    @property
    def config(self) -> Line:
        """What was asked."""
        return part_of(self.plan, "config")

    @property
    def goes_on(self) -> bool:
        """Whether more may come."""
        return self.state in GOES_ON

    @property
    def seconds(self) -> float:
        """Time that the run took, pauses between its parts left out."""
        return sum(part.end - part.start for part in self.parts)

    def minutes(self, moment: float) -> float:
        """Minutes of running until `moment`; pauses between parts do not count."""
        done = 0.0
        for number, part in enumerate(self.parts):
            last = number == len(self.parts) - 1
            if moment <= part.end or last or moment < self.parts[number + 1].start:
                inside = moment - part.start if last else min(moment, part.end) - part.start
                return max(0.0, done + inside) / 60
            done += part.end - part.start
        return done / 60

    def whole_plan(self) -> RunPlan | None:
        """The plan as a value; None when another version of the launcher wrote it, with other fields."""
        try:
            plan: RunPlan = from_data(RunPlan, self.plan)
        except (TypeError, ValueError, AttributeError, StopIteration):
            return None
        return plan


def number(value: object) -> float | None:
    """A finite number, None for anything else that a line may hold (null, text, true)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of hundreds of digits is JSON too
        return None


def numbers(value: object) -> list[float | None]:
    """The entries of a list; empty for what is no list."""
    return [number(item) for item in value] if isinstance(value, list) else []


def known(values: Iterable[float | None]) -> list[float]:
    """Those that are there."""
    return [value for value in values if value is not None]


def part_of(line: Line, *keys: str) -> Line:
    """The object inside an object; empty when it is not there."""
    found = inside(line, *keys)
    return found if isinstance(found, dict) else {}


def read_record(run: RunDir) -> Record:
    """Read a run folder. Raises ConfigError when it has no plan that can be read; all else may be missing."""
    plan = _read_plan(run)
    notes: list[str] = []
    outcome = _read_outcome(run, notes)
    if outcome is None:
        found = find_state(run) if not run.outcome.exists() else None
        state, text = (found.name, found.text) if found else ("lost", "ended, but outcome.json cannot be read")
    else:
        state, text = str(outcome.get("status")), f"{outcome.get('status')}, exit code {outcome.get('exit_code')}"
    events = sorted(_lines(run.events, notes), key=_time)
    monitor = sorted(_lines(run.monitor, notes), key=_time)
    steps, evals = _that_count(_lines(run.metrics, notes), events)
    last = max([0.0, *(_time(line) for line in (*events[-1:], *monitor[-1:], *steps[-1:], *evals[-1:]))])
    return Record(
        run=run,
        plan=plan,
        state=state,
        text=text,
        outcome=outcome,
        parts=_parts(run, plan, outcome, time.time() if state in GOES_ON else last),
        steps=steps,
        evals=evals,
        events=events,
        monitor=monitor,
        statuses=rank_statuses(run),
        notes=tuple(notes),
    )


def _read_plan(run: RunDir) -> Line:
    try:
        plan = read_object(run.plan)
    except ConfigError as error:
        text = "; ".join(problem.text for problem in error.problems)
        tries = ("python -m launcher status   (lists the runs here)", f"python -m launcher logs {run.path}")
        raise ConfigError(Problem(text, tries=tries), title="with this run folder") from None
    if plan is None:
        text = f"{run.path} is no run folder: it has no plan.json"
        problem = Problem(text, tries=("python -m launcher status   (lists the runs here)",))
        raise ConfigError(problem, title="with this run folder")
    return plan


def _read_outcome(run: RunDir, notes: list[str]) -> Line | None:
    try:
        return read_object(run.outcome)
    except ConfigError as error:
        notes.extend(problem.text for problem in error.problems)
        return None


def _lines(path: Any, notes: list[str]) -> list[Line]:
    found = JsonTail(path).read()
    lines = [line for line in found if number(line.get("time")) is not None]
    try:
        written = path.read_bytes().count(b"\n")
    except OSError:
        return lines
    if written > len(lines):
        notes.append(f"{path.name}: {written - len(lines)} of {written} lines cannot be read and are left out")
    return lines


def _time(line: Line) -> float:
    return number(line.get("time")) or 0.0


def _that_count(lines: list[Line], events: list[Line]) -> tuple[list[Line], list[Line]]:
    """Steps and evaluations of the continuation that lives: a resume from step N ends what was done after N."""
    steps: list[Line] = []
    evals: list[Line] = []
    resumes = [line for line in events if line.get("event") == "resumed" and _is_step(line)]
    for line in filter(_is_step, lines):  # in the order they were written: a clock may be set back
        while resumes and _time(resumes[0]) <= _time(line):
            _go_back(steps, evals, resumes.pop(0)["step"] + 1)
        if line.get("kind") == "step":
            _go_back(steps, evals, line["step"])
            steps.append(line)
        elif line.get("kind") == "eval":
            _go_back([], evals, line["step"])
            evals.append(line)
    for line in resumes:
        _go_back(steps, evals, line["step"] + 1)
    return steps, evals


def _is_step(line: Line) -> bool:
    return isinstance(line.get("step"), int) and not isinstance(line["step"], bool)


def _go_back(steps: list[Line], evals: list[Line], step: int) -> None:
    _drop_from(steps, step)
    _drop_from(evals, step)


def _drop_from(lines: list[Line], step: int) -> None:
    while lines and lines[-1]["step"] >= step:
        lines.pop()


def _parts(run: RunDir, plan: Line, outcome: Line | None, until: float) -> tuple[Part, ...]:
    """Every start of the run with its end, in order; `until` stands for the end that was not written down."""
    found = []
    count = 1
    while (run.path / f"plan.{count}.json").exists():
        found.append(_part(*(read_quietly(run.path / f"{name}.{count}.json") for name in ("plan", "outcome"))))
        count += 1
    found.append(_part(plan, outcome or {}))
    parts: list[Part] = []
    for index, (start, end) in enumerate(found):
        if start is None:
            continue
        following = next((s for s, _ in found[index + 1 :] if s is not None), until)
        parts.append(Part(start=start, end=max(start, following if end is None else end)))
    written = run.plan.stat().st_mtime
    return tuple(parts) or (Part(start=written, end=max(written, until)),)


def _part(plan: Line, outcome: Line) -> tuple[float | None, float | None]:
    return _moment(outcome.get("started")) or _moment(plan.get("created_at")), _moment(outcome.get("ended"))


def _moment(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def flat(value: Line, prefix: str = "") -> dict[str, str]:
    """Nested keys as `a.b`, each with its value as text."""
    found: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found.update(flat(item, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return found
