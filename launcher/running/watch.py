"""Looks at run folders from outside: `status`, `logs`, `stop`. State is what lies in the folder and what lives."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, ExitCode, MachineError, Problem
from launcher.rundir import SWEEP, RunDir, complete_checkpoints
from launcher.running.agent import Process, kill_run, send
from launcher.running.journal import (
    eval_scores,
    evaluations,
    inside,
    last_step,
    rank_statuses,
    read_quietly,
    short_path,
)
from launcher.running.outcome import exported, last_checkpoint, resume_command, steps_done
from launcher.running.progress import render_numbers, render_scores
from launcher.running.state import (
    LATEST,
    State,
    current_job,
    find_folder,
    find_state,
    is_sweep,
    list_runs,
    list_sweeps,
    read_object,
    run_name,
)
from launcher.running.supervisor import Supervisor, read_supervisor

TAIL_LINES = 20
POLL_S = 0.3
STOP_MARGIN_S = 30.0  # beyond cluster.stop_grace_s, for killing and writing the outcome
RUNS = "runs"
MARKS = ("error", "traceback", "exception", "fatal", "killed", "out of memory", "warning: ")


def main(verb: str, argv: Sequence[str]) -> int:
    """Run `status`, `logs` or `stop` with its arguments; the exit code. Raises LauncherError."""
    parser = argparse.ArgumentParser(prog=f"python -m launcher {verb}", description=DESCRIPTIONS[verb])
    parser.add_argument("run", nargs="?", help="run folder, its name, or `latest`")
    parser.add_argument("--root", default=RUNS, help="folder of run folders (default: %(default)s)")
    if verb == "logs":
        parser.add_argument("-f", "--follow", action="store_true", help="go on as lines are written")
        parser.add_argument("--rank", type=int, help="only this rank; without it rank 0, or all with --errors")
        parser.add_argument("--errors", action="store_true", help="only lines that tell of an error, of all ranks")
        parser.add_argument("-n", "--lines", type=int, default=TAIL_LINES, help="last lines (default: %(default)s)")
    return VERBS[verb](parser.parse_args(list(argv)))


def status(options: argparse.Namespace) -> int:
    """Print one run in detail, or all in a table."""
    if options.run is not None:
        run = find_folder(options.run, options.root)
        print("\n".join(_sweep_details(run) if is_sweep(run) else _details(run)))
        return ExitCode.OK
    runs = sorted([*list_runs(options.root), *list_sweeps(options.root)], key=_age)
    if not runs:
        print(f"no run in {Path(options.root).absolute()}")
        return ExitCode.OK
    rows = [("run", "state", "step", "loss", "last evaluation"), *(_row(run) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return ExitCode.OK


def _age(run: RunDir) -> float:
    """Sorts the newest first."""
    return -(run.path / SWEEP if is_sweep(run) else run.plan).stat().st_mtime


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
    metric = str(inside(read_quietly(run.plan), "config", "eval", "metric"))
    scores = [eval_scores(line).get(metric) for line in evaluations(run)[-1:]]
    return f"{metric} {scores[0]:.4f}" if scores and scores[0] is not None else "-"


def _details(run: RunDir) -> list[str]:
    state, statuses = find_state(run), rank_statuses(run)
    lines = [f"run     {short_path(run.path)}", f"state   {state.text}"]
    step = last_step(run)
    if step is not None:
        lines.append(f"step    {step['step']}/{step['total_steps']}  {render_numbers(step)}")
    else:
        lines.append(f"step    {steps_done(run, statuses)}")
    for line in evaluations(run)[-1:]:
        lines.append(f"eval    step {line['step']}: {render_scores(line)}")
    for rank, entry in statuses.items():
        lines.append(f"rank {rank:<2} {_rank_text(entry, state)}")
    lines += [f"saved   {short_path(folder)}" for folder in complete_checkpoints(run)]
    lines.append(f"logs    {short_path(run.logs)}")
    if (export := exported(run)) is not None:
        lines.append(f"export  {short_path(export)}")
    if run.report.exists():
        lines.append(f"report  {short_path(run.report)}")
    return [*lines, *_resume_lines(run, state)]


def _resume_lines(run: RunDir, state: State) -> list[str]:
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


def logs(options: argparse.Namespace) -> int:
    """Print the end of rank logs, and what is written to them when asked to follow."""
    run = _of_one_run(find_folder(options.run or LATEST, options.root))
    files = _log_files(run, options.rank, everything=options.errors)
    if not files:
        what = "no log yet" if options.rank is None else f"no log of rank {options.rank}"
        names = ", ".join(path.name for path in sorted(run.logs.glob("*.log"))) or "none"
        raise ConfigError(Problem(f"{what} in {run.logs}; there: {names}"), title="with this run")
    wanted = _is_error if options.errors else _any
    tails = [(path, *_tail(path, options.lines, wanted)) for path in files]
    prefix = len(files) > 1
    for path, lines, _ in tails:
        _print_lines(path, lines, prefix)
    if options.errors and not any(lines for _, lines, _ in tails):
        print(f"no line in {short_path(run.logs)} tells of an error", file=sys.stderr)
    if options.follow:
        _follow(run, {path: offset for path, _, offset in tails}, wanted, prefix)
    return ExitCode.OK


def _of_one_run(run: RunDir) -> RunDir:
    """The run itself; of a sweep the job that was started last."""
    if not is_sweep(run):
        return run
    job = current_job(run)
    if job is None:
        raise ConfigError(Problem(f"no job of {run.path} has started"), title="with this sweep")
    return job


def _log_files(run: RunDir, rank: int | None, *, everything: bool) -> list[Path]:
    if everything and rank is None:
        return sorted(run.logs.glob("*.log"))
    return sorted(run.logs.glob(f"*.{rank or 0}.log")) or (sorted(run.logs.glob("*.node.log")) if rank is None else [])


def _any(line: str) -> bool:
    return True


def _is_error(line: str) -> bool:
    lower = line.lower()
    return any(mark in lower for mark in MARKS)


def _tail(path: Path, count: int, wanted: Callable[[str], bool]) -> tuple[list[str], int]:
    """The last wanted lines, and where reading goes on."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    lines = [line for line in data.decode(errors="replace").splitlines() if wanted(line)]
    return (lines[-count:] if count > 0 else []), whole


def _print_lines(path: Path, lines: Sequence[str], prefix: bool) -> None:
    for line in lines:
        print(f"{path.stem}: {line}" if prefix else line, flush=True)


def _follow(run: RunDir, offsets: dict[Path, int], wanted: Callable[[str], bool], prefix: bool) -> None:
    """Print new whole lines until the run is over."""
    while True:
        over = find_state(run).over  # looked at first: what was written before it is still printed
        for path, offset in offsets.items():
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            offsets[path] = offset + whole
            _print_lines(path, [x for x in data[:whole].decode(errors="replace").splitlines() if wanted(x)], prefix)
        if over:
            return
        time.sleep(POLL_S)


def stop(options: argparse.Namespace) -> int:
    """Ask the run to save and end, and wait until it has."""
    if options.run is None:  # never guessed: the last run may be somebody else's
        raise ConfigError(Problem("stop which run?", tries=("python -m launcher stop RUN",)), title="with this command")
    run = find_folder(options.run, options.root)
    state = find_state(run)
    if state.over:
        print(f"nothing to stop: {state.text}")
        return ExitCode.OK
    if state.name == "unknown" or state.supervisor is None:
        raise ConfigError(Problem(state.text, tries=("the same command on that machine",)), title="with stopping it")
    grace_s = _grace_s(run)
    if state.name == "running":
        send(Process(state.supervisor.pid, state.supervisor.start), signal.SIGTERM)
        print(f"asked process {state.supervisor.pid} to stop: it finishes the step and saves, at most {grace_s:.0f} s")
        print("the same command once more ends it at once", flush=True)
    else:
        print(state.text, flush=True)
    if not _wait_for_end(run, grace_s + STOP_MARGIN_S):
        left = kill_run(_run_id(run, state.supervisor))
        if left:
            raise MachineError(Problem(f"processes {left} do not die"))
    state = find_state(run)
    print("\n".join([state.text, *([] if is_sweep(run) else _resume_lines(run, state))]))
    return ExitCode.OK


def _run_id(run: RunDir, supervisor: Supervisor) -> str:
    """By what its processes are found; of a sweep those of the job that goes on."""
    job = current_job(run) if is_sweep(run) else run
    found = read_supervisor(job) if job else None
    return (found or supervisor).run_id


def _wait_for_end(run: RunDir, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if find_state(run).over:
            return True
        time.sleep(POLL_S)
    return False


def _grace_s(run: RunDir) -> float:
    try:
        if is_sweep(run):
            return float((read_object(run.path / SWEEP) or {})["stop_grace_s"])
        return float((read_object(run.plan) or {})["config"]["cluster"]["stop_grace_s"])
    except (KeyError, TypeError, ValueError):
        return 120.0


VERBS = {"status": status, "logs": logs, "stop": stop}
DESCRIPTIONS = {
    "status": "What runs are doing: all of them, or one in detail.",
    "logs": "The log of a rank.",
    "stop": "Have a run save and end; once more ends it at once.",
}
