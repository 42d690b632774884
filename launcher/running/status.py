"""`status`: what runs are doing, all in a table or one in detail."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, ExitCode
from launcher.rundir import SWEEP, RunDir, complete_checkpoints
from launcher.running import queued
from launcher.running.journal import (
    JsonTail,
    Line,
    eval_scores,
    evaluations,
    inside,
    last_step,
    rank_statuses,
    read_quietly,
    short_path,
)
from launcher.running.outcome import exported, foretold_lines, last_checkpoint, resume_command, steps_done
from launcher.running.progress import RATE_STEPS, render_numbers, render_scores, render_time
from launcher.running.restart import restarts_of
from launcher.running.state import (
    State,
    begun_at,
    find_folder,
    find_state,
    holds_runs,
    is_sweep,
    list_runs,
    list_sweeps,
    read_object,
    run_name,
)
from launcher.spec import metric_of

PACE_STEPS = 200  # from so many the time left is told
EACH = 8  # ranks that have a line of their own


def status(options: argparse.Namespace) -> int:
    """Print one run in detail, or all in a table."""
    if options.run is not None and holds_runs(Path(options.run)):
        options.root, options.run = options.run, None
    if options.run is not None:
        run = find_folder(options.run, options.root, new=True)
        print("\n".join(_sweep_details(run) if is_sweep(run) else _details(run)))
        return ExitCode.OK
    runs = sorted([*list_runs(options.root, new=True), *list_sweeps(options.root)], key=begun_at, reverse=True)
    if not runs:
        print(f"no run in {Path(options.root).absolute()}")
        return ExitCode.OK
    rows = [("run", "state", "step", "loss", "last evaluation"), *(_row(run) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return ExitCode.OK


def _sweep_details(run: RunDir) -> list[str]:
    """A sweep with its table as far as it is."""
    from launcher.running.results import result_table

    lines = [f"sweep   {short_path(run.path)}", f"state   {find_state(run).text}"]
    try:
        return [*lines, "", *result_table(read_object(run.path / SWEEP) or {}, run)]
    except (KeyError, TypeError, ValueError):
        return [*lines, f"{run.path / SWEEP} is damaged, or of another version"]


def _row(run: RunDir) -> tuple[str, ...]:
    try:
        return _healthy_row(run)
    except ConfigError:  # one damaged folder must not hide the others; `status RUN` tells what is wrong
        return run_name(run), "damaged", "-", "-", "-"


def _healthy_row(run: RunDir) -> tuple[str, ...]:
    state = find_state(run).name
    if is_sweep(run):
        jobs = (read_object(run.path / SWEEP) or {}).get("jobs", [])
        done = sum(job.get("status") == "done" for job in jobs)
        return run.path.name, state, f"{done}/{len(jobs)} jobs", "-", "-"
    step = last_step(run)
    if step is None:
        return run_name(run), state, "-", "-", _last_score(run)
    loss = "-" if step.get("loss") is None else f"{step['loss']:.4f}"
    return run_name(run), state, f"{step['step']}/{step['total_steps']}", loss, _last_score(run)


def _last_score(run: RunDir) -> str:
    """The metric that picks the run's best checkpoint, as it was evaluated last."""
    metric = metric_of(inside(read_quietly(run.plan), "config") or {})
    scores = [eval_scores(line).get(metric) for line in evaluations(run)[-1:]]
    return f"{metric} {scores[0]:.4f}" if scores and scores[0] is not None else "-"


def _details(run: RunDir) -> list[str]:
    state, statuses, now = find_state(run), rank_statuses(run), time.time()
    lines = [f"run     {short_path(run.path)}", f"state   {state.text}", *_attempt_lines(run)]
    if queued.is_new(run):
        return [*lines, f"logs    {short_path(run.slurm)}"]
    step = last_step(run)
    if step is not None:
        left = "" if state.over else render_time(seconds_left(run, now))
        parts = [f"step    {step['step']}/{step['total_steps']}", render_numbers(step), left]
        lines.append("  ".join(filter(None, parts)))
    else:
        lines.append(f"step    {steps_done(run, statuses)}")
    for line in evaluations(run)[-1:]:
        lines.append(f"eval    step {line['step']}: {render_scores(line)}")
    lines += [f"plan    {text}" for text in foretold_lines(run)]
    lines += host_lines(run, statuses, state, now)
    lines += [f"rank {rank:<2} {_rank_text(statuses[rank], state)}" for rank in _shown_ranks(statuses)]
    lines += [f"saved   {short_path(folder)}" for folder in complete_checkpoints(run)]
    lines.append(f"logs    {short_path(run.logs)}")
    if (export := exported(run)) is not None:
        lines.append(f"export  {short_path(export)}")
    if run.report.exists():
        lines.append(f"report  {short_path(run.report)}")
    return [*lines, *resume_lines(run, state)]


def _attempt_lines(run: RunDir) -> list[str]:
    """Which start of the run this is, when it was started again after a failure."""
    plan = read_quietly(run.plan)
    number, most = restarts_of(str(plan.get("run_id"))), inside(plan, "config", "restart", "max")
    if not number:
        return []
    events = [line for line in JsonTail(run.events).read() if line.get("event") == "restart"]
    why = f", after: {events[-1].get('why')}" if events else ""
    return [f"start   {number + 1} of at most {most + 1 if isinstance(most, int) else '?'}{why}"]


def seconds_left(run: RunDir, now: float) -> float | None:
    """By the pace of the last steps, evaluations and saves among them included.

    None when there are too few, when all are done, and before the first of this start.
    """
    steps = [line for line in JsonTail(run.metrics).read() if line.get("kind") == "step"][-PACE_STEPS:]
    try:
        done, since = steps[-1]["step"] - steps[0]["step"], steps[-1]["time"] - steps[0]["time"]
        if done < RATE_STEPS or steps[-1]["step"] >= steps[-1]["total_steps"]:
            return None
        if steps[-1]["time"] < run.plan.stat().st_mtime:
            return None
        left = (steps[-1]["total_steps"] - steps[-1]["step"]) * since / done
        return max(0.0, float(left - (now - steps[-1]["time"])))
    except (IndexError, KeyError, TypeError, OSError):
        return None


def host_lines(run: RunDir, statuses: Mapping[int, Line], state: State, now: float) -> list[str]:
    """One line a host when there are several: its ranks, what they do, whether contact is lost."""
    hosts = planned_hosts(run) or dict.fromkeys(str(status.get("host")) for status in statuses.values())
    if len(hosts) < 2:
        return []
    lost = {} if state.over else lost_contact(run)
    width, lines, first = max(map(len, hosts)), [], 0
    for host in hosts:
        own = {rank: status for rank, status in statuses.items() if status.get("host") == host}
        slots = hosts[host] or len(own)
        ranks = f"rank {first}" if slots == 1 else f"ranks {first}-{first + slots - 1}"
        text = f"{host:<{width}}  {ranks}: {_doing(own, slots)}"
        if host in lost:
            text += f"; contact lost {now - lost[host][0]:.0f} s ago ({lost[host][1]})"
        lines.append(text)
        first += slots
    return lines


def _doing(own: Mapping[int, Line], slots: int) -> str:
    counts = Counter(
        str(status.get("phase") if status.get("state") in ("starting", "running") else status.get("state"))
        for status in own.values()
    )
    if len(own) < slots:
        counts["not heard of"] = slots - len(own)
    steps = [int(status.get("step") or 0) for status in own.values()]
    told = ", ".join(what if len(counts) == 1 else f"{count} {what}" for what, count in counts.most_common())
    if not steps:
        return told
    return told + (f", step {steps[0]}" if min(steps) == max(steps) else f", steps {min(steps)} to {max(steps)}")


def lost_contact(run: RunDir) -> dict[str, tuple[float, str]]:
    """Hosts that are out of contact: since when and why."""
    lost: dict[str, tuple[float, str]] = {}
    for line in JsonTail(run.events).read():
        host = str(line.get("host"))
        if line.get("event") == "contact_lost" and isinstance(line.get("time"), int | float):
            lost[host] = (line["time"], str(line.get("reason")))
        elif line.get("event") == "contact_back":
            lost.pop(host, None)
        elif line.get("event") == "restart":
            lost.clear()
    return lost


def planned_hosts(run: RunDir) -> dict[str, int]:
    """Ranks of each host of the plan, in its order."""
    hosts = read_quietly(run.plan).get("hosts")
    found = {}
    for host in hosts if isinstance(hosts, list) else []:
        name, gpus = inside(host, "name"), inside(host, "gpus")
        if isinstance(name, str) and isinstance(gpus, list):
            found[name] = len(gpus)
    return found


def _shown_ranks(statuses: Mapping[int, Line]) -> list[int]:
    """All ranks while they are few, else those that have failed."""
    if len(statuses) <= EACH:
        return list(statuses)
    return [rank for rank, status in statuses.items() if status.get("state") == "failed"][:EACH]


def resume_lines(run: RunDir, state: State) -> list[str]:
    """How to go on with a run that has ended before its end."""
    checkpoint = last_checkpoint(run)
    if checkpoint is None or not state.over or state.name == "done":
        return []
    return [f"resume  {resume_command(run, checkpoint)}"]


def _rank_text(entry: dict[str, Any], state: State) -> str:
    """What a rank said last; a rank that can no longer be working is said to be gone."""
    said = entry.get("state", "?")
    text = f"{said}, {entry.get('phase')}, step {entry.get('step')}, process {entry.get('pid')} on {entry.get('host')}"
    error = entry.get("error")
    if error:
        first = next(iter(str(error.get("message", "")).strip().splitlines()), "")
        return f"{text}: {error.get('type')}: {first}"
    if said in ("starting", "running") and state.over:
        return f"gone; said last: {text}"
    return text
