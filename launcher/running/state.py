"""Finds run folders and says what a run is doing, by what lies in its folder and which of its processes live."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning import placement
from launcher.rundir import SWEEP, RunDir, read_json
from launcher.running import queued
from launcher.running.agent import find_run
from launcher.running.journal import JsonTail, inside, read_quietly, short_path
from launcher.running.supervisor import Supervisor, read_supervisor
from launcher.spec import Host

LATEST = "latest"
GOES_ON = ("queued", "running", "ending", "unknown")


@dataclass(frozen=True, slots=True)
class State:
    """What a run is doing, seen from outside."""

    name: str  # queued | running | ending | lost | unknown, or the outcome's status
    text: str
    supervisor: Supervisor | None

    @property
    def over(self) -> bool:
        """Whether nothing of it lives."""
        return self.name not in GOES_ON


def find_state(run: RunDir) -> State:
    """Whether the run (or sweep) lives, by its processes; how it ended, by its outcome."""
    supervisor = read_supervisor(run)
    if is_sweep(run):
        return _sweep_state(run, supervisor)
    if supervisor is not None and supervisor.alive:
        return State("running", f"running, supervised by process {supervisor.pid}", supervisor)
    outcome = read_object(run.outcome)
    if outcome is not None and _goes_on(run, outcome, supervisor):
        outcome = None
    in_queue = _queue_state(run, outcome, supervisor)
    if in_queue is not None:
        return in_queue
    if outcome is not None:
        first = (outcome.get("first_failure") or {}).get("text")
        text = f"{outcome.get('status')} (exit code {outcome.get('exit_code')}){f': {first}' if first else ''}"
        return State(str(outcome.get("status")), text, supervisor)
    if supervisor is None:
        return State("lost", "never started", None)
    if not supervisor.here:
        sign = f"; its last sign is {quiet_s(run):.0f} s old"
        text = f"supervised by process {supervisor.pid} on {supervisor.host}, which cannot be seen from here{sign}"
        return State("unknown", text, supervisor)
    return _unsupervised(run, supervisor)


def _queue_state(run: RunDir, outcome: dict[str, Any] | None, supervisor: Supervisor | None) -> State | None:
    """What Slurm says of a run that was handed to it; None where that adds nothing to what the folder tells."""
    job, begun = queued.job_of(run), not queued.is_new(run)
    if not queued.was_submitted(run) or (outcome is not None and outcome.get("status") == "done"):
        return None  # done once: a job that is to train longer is seen as soon as it begins
    if job is None:
        return None if begun else State("lost", "never started: its job has no number (yet)", None)
    answer = queued.ask(job)
    if not answer.heard:
        text = f"handed to Slurm as job {job}; more cannot be told from here: {answer.text}"
        return None if begun else State("queued", text, None)
    if answer.waits:
        return State("queued", f"waits in Slurm's queue{' again' if begun else ''}: {answer.text}", supervisor)
    if answer.works:
        return _works_state(answer.text, outcome, supervisor)
    if outcome is not None or (supervisor is not None and supervisor.here):
        return None
    output = run.slurm / "output.txt"
    said = f"; what it said is in {short_path(output)}" if output.is_file() else ""
    return State("lost", f"{'ended without an outcome' if begun else 'never started'}: {answer.text}{said}", supervisor)


def _works_state(job: str, outcome: dict[str, Any] | None, supervisor: Supervisor | None) -> State:
    """A run whose job is at work on a machine that is not this one."""
    if outcome is not None:
        return State("queued", f"{outcome.get('status')}, and its job goes on: {job}", supervisor)
    if supervisor is None:
        return State("queued", f"about to begin: {job}", None)
    return State("running", f"{job}, supervised by process {supervisor.pid} on {supervisor.host}", supervisor)


def _unsupervised(run: RunDir, supervisor: Supervisor) -> State:
    """A run whose launching process, on this machine, was killed."""
    left, others = find_run(supervisor.run_id), remote_hosts(run)
    unseen = f"what runs on {_listed(others)} cannot be seen from here"
    if left:
        text = f"its launching process is gone; {len(left)} processes of it still live and are being ended"
        return State("ending", f"{text}; {unseen}" if others else text, supervisor)
    if others and quiet_s(run) < parting_s(run):
        text = f"its launching process is gone; {unseen}, and ends by itself within {parting_s(run):.0f} s"
        return State("ending", text, supervisor)
    text = "ended without an outcome: its launching process was killed"
    return State("lost", f"{text}; {unseen}, and has ended unless that host is stuck" if others else text, supervisor)


def _goes_on(run: RunDir, outcome: dict[str, Any], supervisor: Supervisor | None) -> bool:
    """Whether an outcome is that of a start after which the supervisor, on another machine, begins another one."""
    if supervisor is None or supervisor.here:
        return False
    try:
        started = datetime.fromisoformat(str(outcome.get("started"))).timestamp()
    except ValueError:
        return False
    last = next((line for line in reversed(JsonTail(run.events).read()) if line.get("event") == "restart"), {})
    when = last.get("time")
    return last.get("number") == outcome.get("attempt") and isinstance(when, int | float) and when >= started


def remote_hosts(run: RunDir) -> list[str]:
    """Hosts of the plan that are not this machine, as far as names tell."""
    hosts = read_quietly(run.plan).get("hosts")
    names = [str(inside(host, "name")) for host in hosts if inside(host, "name")] if isinstance(hosts, list) else []
    here = socket.gethostname()
    return [name for name in names if not placement.is_this_machine(Host(name=name, gpus=()), here)]


def quiet_s(run: RunDir) -> float:
    """Seconds since anything of the run was written here."""
    paths = [run.plan, run.metrics, run.events, run.monitor, *run.ranks.glob("*.json"), *run.logs.glob("*.log")]
    return max(0.0, time.time() - max((path.stat().st_mtime for path in paths if path.exists()), default=0.0))


def parting_s(run: RunDir) -> float:
    """How long ranks may live on after their launching process, at most."""
    cluster = inside(read_quietly(run.plan), "config", "cluster")
    waits = [inside(cluster, name) for name in ("stop_grace_s", "lost_contact_s")]
    return sum(float(wait) for wait in waits if isinstance(wait, int | float))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more hosts" if len(names) > 3 else "")


def _sweep_state(run: RunDir, supervisor: Supervisor | None) -> State:
    data = read_object(run.path / SWEEP) or {}
    jobs = data.get("jobs", [])
    over = sum(job.get("status") not in ("waiting", "running") for job in jobs)
    if supervisor is not None and supervisor.alive:
        return State(
            "running", f"running, {over} of {len(jobs)} jobs over, led by process {supervisor.pid}", supervisor
        )
    if data.get("status") != "running":
        done = sum(job.get("status") == "done" for job in jobs)
        text = f"{data.get('status')} (exit code {data.get('exit_code')}): {done} of {len(jobs)} jobs done"
        return State(str(data.get("status")), text, supervisor)
    job = current_job(run)
    state = find_state(job) if job else None
    if job is not None and state is not None and not state.over:
        name = "unknown" if state.name == "unknown" else "ending"
        return State(name, f"its process is gone; job {job.path.name}: {state.text}", state.supervisor)
    return State("lost", f"ended before its end, after {over} of {len(jobs)} jobs: its process was killed", supervisor)


def is_sweep(run: RunDir) -> bool:
    """Whether the folder is that of a sweep, with its runs inside."""
    return (run.path / SWEEP).is_file()


def current_job(sweep: RunDir) -> RunDir | None:
    """The job of a sweep that was started last; None when none was."""
    jobs = (read_object(sweep.path / SWEEP) or {}).get("jobs", [])
    started = [run for job in jobs if (run := RunDir(sweep.path / str(job.get("folder")))).plan.exists()]
    return started[-1] if started else None


def run_name(run: RunDir) -> str:
    """The name below the folder of runs: a job has its sweep's before its own."""
    inside = is_sweep(RunDir(run.path.parent))
    return f"{run.path.parent.name}/{run.path.name}" if inside else run.path.name


_ELSEWHERE = ("the same command in the folder where the run was started", "the path of its run folder")


def find_folder(name: str, root: str, *, new: bool = False) -> RunDir:
    """The folder of the run or sweep that a person means: a path, a name below `root`, or `latest`, the last run.

    `new`: one that Slurm has not started yet will do. Raises ConfigError if there is none.
    """
    known = list_runs(root, new=new)
    if name == LATEST:
        if not known:
            raise _no_run(f"no run in {Path(root).absolute()}", *_ELSEWHERE)
        return known[0]
    for path in (Path(name), Path(root, name)):
        if path.is_dir():
            if queued.is_new(RunDir(path)):
                if new:
                    return RunDir(path)
                raise _no_run(f"{path} was handed to Slurm and has not begun", f"python -m launcher status {path}")
            if not (path / "plan.json").exists() and not is_sweep(RunDir(path)):
                if holds_runs(path):
                    raise _no_run(f"{path} is a folder of runs; one is wanted", f"python -m launcher status {path}")
                raise _no_run(f"{path} is no run folder: it has no plan.json", "python -m launcher status")
            return RunDir(path)
    names = [run_name(run) for run in known[:3]]
    raise _no_run(f"no run folder {name}, here or in {root}", *(names or _ELSEWHERE))


def holds_runs(path: Path) -> bool:
    """Whether a path is a folder of run folders, as `runs` is, and no run or sweep itself."""
    return not RunDir(path).plan.exists() and not is_sweep(RunDir(path)) and bool(list_runs(str(path), new=True))


def list_runs(root: str, *, new: bool = False) -> list[RunDir]:
    """Run folders below `root`, those inside sweeps too, the newest first; `new` as in `find_folder`."""
    plans = [*Path(root).glob("*/plan.json")]
    plans += [path for sweep in list_sweeps(root) for path in sweep.path.glob("*/plan.json")]
    runs = [RunDir(path.parent) for path in plans]
    if new:
        runs += [
            run for path in Path(root).glob("*/slurm/job.json") if queued.is_new(run := RunDir(path.parent.parent))
        ]
    return sorted(runs, key=begun_at, reverse=True)


def begun_at(run: RunDir) -> float:
    """When a run or sweep was begun, or handed to Slurm, as far as files tell."""
    marks = [run.path / SWEEP, run.plan, run.slurm / "job.json"]
    return next((mark.stat().st_mtime for mark in marks if mark.exists()), 0.0)


def list_sweeps(root: str) -> list[RunDir]:
    """Folders of sweeps below `root`."""
    return [RunDir(path.parent) for path in Path(root).glob(f"*/{SWEEP}")]


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None when the file is missing, ConfigError when it is damaged."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _no_run(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise _no_run(f"{path} holds no JSON object")
    return value


def _no_run(text: str, *tries: str) -> ConfigError:
    return ConfigError(Problem(text, tries=tries), title="with this run folder")
