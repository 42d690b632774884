"""How a run ended, for people (the last lines on the terminal) and for programs (outcome.json)."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher.reporting.foretold import foretold_line
from launcher.rundir import RunDir, complete_checkpoints, write_json
from launcher.running.causes import signal_name
from launcher.running.failures import Failure
from launcher.running.journal import JsonTail, best_of, eval_scores, evaluations, last_step, read_quietly, short_path
from launcher.running.verdict import Tally, Verdict


def write_outcome(
    run: RunDir, verdict: Verdict, tally: Tally, *, started: float, ended: float, metric: str, attempt: int = 1
) -> None:
    """Write outcome.json: status, exit code, times, failures with the first cause first, and what was reached.

    `attempt` counts the starts of the same run, restarts included.
    """
    failures = [_failure_data(failure) for failure in verdict.failures]
    checkpoint, export = last_checkpoint(run), exported(run)
    write_json(
        run.outcome,
        {
            "status": verdict.status,
            "exit_code": int(verdict.exit_code),
            "started": _timestamp(started),
            "ended": _timestamp(ended),
            "seconds": round(ended - started, 1),
            "attempt": attempt,
            "hosts": list(dict.fromkeys(host for _, host in sorted(tally.hosts.items()))),
            "first_failure": failures[0] if failures else None,
            "failures": failures,
            "steps": steps_done(run, tally.statuses),
            "last_checkpoint": str(checkpoint) if checkpoint else None,
            "export": str(export) if export else None,
            "eval": _eval_data(run, metric),
        },
    )


def render_end(run: RunDir, verdict: Verdict, tally: Tally, metric: str, note: str = "") -> str:
    """The last lines on the terminal; `note` says what was done about failures before."""
    if verdict.status == "failed":
        lines = _failure_lines(verdict.failures)
    elif verdict.status == "done":
        lines = ["done", *eval_table(run, metric), *(f"  {text}" for text in foretold_lines(run))]
    elif verdict.status == "stopped":
        lines = [f"stopped after step {steps_done(run, tally.statuses)}"]
    else:
        lines = ["ranks were killed before they had saved and ended: what came after the last checkpoint is lost"]
    if note:
        lines.append(f"  note    {note}")
    for rank in tally.late_deaths():
        log = short_path(run.log(tally.hosts[rank], rank))
        lines.append(f"  note    rank {rank} crashed while it left, after all was done: {log}")
    if tally.survivors:
        pids = ", ".join(map(str, tally.survivors))
        lines.append(f"  these processes do not die (stuck in a driver or file system?): {pids}")
    checkpoint, export = last_checkpoint(run), exported(run)
    lines.append(f"  run     {short_path(run.path)}")
    if export:
        lines.append(f"  export  {short_path(export)}")
    if run.report.exists():
        lines.append(f"  report  {short_path(run.report)}")
    if verdict.status != "done" and checkpoint:
        lines.append(f"  resume  {resume_command(run, checkpoint)}")
    return "\n".join(lines)


def eval_table(run: RunDir, metric: str) -> list[str]:
    """Evaluation metrics before training, at the best step, and at the end, as aligned lines."""
    lines = evaluations(run)
    if not lines:
        return []
    best = _best(lines, metric)
    columns = {"before" if lines[0]["step"] == 0 else f"step {lines[0]['step']}": lines[0]}
    if best is not lines[0] and best is not lines[-1]:
        columns[f"best (step {best['step']})"] = best
    if len(lines) > 1:
        columns[f"end (step {lines[-1]['step']})"] = lines[-1]
    names = list(dict.fromkeys(name for line in columns.values() for name in eval_scores(line)))
    if not names:
        return []  # no score of any evaluation was a finite number
    width = max(len(name) for name in names)
    rows = [f"  {'':{width}}" + "".join(f"  {head:>16}" for head in columns)]
    for name in names:
        cells = (eval_scores(line).get(name) for line in columns.values())
        rows.append(f"  {name:{width}}" + "".join(f"  {'-' if c is None else format(c, '.4f'):>16}" for c in cells))
    return rows


def foretold_lines(run: RunDir) -> list[str]:
    """What the plan said of memory and time beside what came, in one line; none where nothing can be compared."""
    steps = [line for line in JsonTail(run.metrics).read() if line.get("kind") == "step"]
    line = foretold_line(read_quietly(run.plan), steps)
    return [] if line is None else [line]


def resume_command(run: RunDir, checkpoint: Path) -> str:
    """What to type to go on, and from where that is."""
    return f"python -m launcher resume {short_path(run.path)}   (from {checkpoint.name})"


def steps_done(run: RunDir, statuses: dict[int, dict[str, Any]]) -> int:
    """Optimizer steps that all of the run's ranks have taken, as far as they said."""
    step = last_step(run)
    written = int(step["step"]) if step else 0
    return max([written, *(int(status.get("step", 0)) for status in statuses.values())])


def last_checkpoint(run: RunDir) -> Path | None:
    """The newest whole checkpoint."""
    found = complete_checkpoints(run)
    return found[-1] if found else None


def exported(run: RunDir) -> Path | None:
    """The export when it was written."""
    return run.export if run.export.is_dir() and any(run.export.glob("*.safetensors")) else None


def _best(lines: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    trained = [line for line in lines if line["step"] > 0] or lines
    return best_of(trained, metric) or trained[0]


def _eval_data(run: RunDir, metric: str) -> dict[str, Any] | None:
    lines = evaluations(run)
    if not lines:
        return None
    return {"metric": metric, "before": lines[0], "best": _best(lines, metric), "after": lines[-1]}


def _failure_lines(failures: tuple[Failure, ...]) -> list[str]:
    first, *others = failures
    lines = [first.headline(), *(f"    {line}" for line in first.details()), f"  log     {short_path(Path(first.log))}"]
    if first.advice:
        lines.append(f"  try     {first.advice}")
    for failure in others[:3]:
        lines.append(f"  later   {failure.headline()}")
    if len(others) > 3:
        lines.append(f"  later   {len(others) - 3} more, in outcome.json")
    return lines


def _failure_data(failure: Failure) -> dict[str, Any]:
    data = {f.name: getattr(failure, f.name) for f in dataclasses.fields(failure) if f.name != "lines"}
    name = signal_name(failure.signal) if failure.signal is not None else None
    return {**data, "time": _timestamp(failure.time), "signal_name": name, "text": failure.headline()} | {
        "cause": failure.cause.name
    }


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
