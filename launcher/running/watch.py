"""Looks at run folders from outside: `status`, `logs`, `stop`. State is what lies in the folder and what lives."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence

from launcher.errors import ConfigError, ExitCode, MachineError, Problem
from launcher.rundir import SWEEP, RunDir
from launcher.running import logs, queued
from launcher.running.agent import kill_run
from launcher.running.logs import POLL_S
from launcher.running.state import State, current_job, find_folder, find_state, is_sweep, read_object
from launcher.running.status import resume_lines, status
from launcher.running.supervisor import Supervisor, ask_by_file, read_supervisor

STOP_MARGIN_S = 30.0  # beyond cluster.stop_grace_s, for killing and writing the outcome
RUNS = "runs"


def main(verb: str, argv: Sequence[str]) -> int:
    """Run `status`, `logs` or `stop` with its arguments; the exit code. Raises LauncherError."""
    parser = argparse.ArgumentParser(prog=f"python -m launcher {verb}", description=DESCRIPTIONS[verb])
    parser.add_argument("run", nargs="?", help="run folder, its name, or `latest`")
    parser.add_argument("--root", default=RUNS, help="folder of run folders (default: %(default)s)")
    if verb == "logs":
        logs.add_options(parser)
    return VERBS[verb](parser.parse_args(list(argv)))


def stop(options: argparse.Namespace) -> int:
    """Ask the run to save and end, and wait until it has."""
    if options.run is None:  # never guessed: the last run may be somebody else's
        raise ConfigError(Problem("stop which run?", tries=("python -m launcher stop RUN",)), title="with this command")
    run = find_folder(options.run, options.root, new=True)
    state = find_state(run)
    if state.over:
        print(f"nothing to stop: {state.text}")
        return ExitCode.OK
    if state.name == "queued":
        return _stop_queued(run)
    if state.supervisor is None or (state.name == "unknown" and is_sweep(run)):
        raise ConfigError(Problem(state.text, tries=("the same command on that machine",)), title="with stopping it")
    grace_s = _grace_s(run)
    if state.name in ("running", "unknown"):
        print(f"{_ask(run, state.supervisor)}: it finishes the step and saves, at most {grace_s:.0f} s")
        print("the same command once more ends it at once", flush=True)
    else:
        print(state.text, flush=True)
    if not _wait_for_end(run, grace_s + STOP_MARGIN_S):
        _force(run, state)
    state = find_state(run)
    print("\n".join([state.text, *([] if is_sweep(run) else resume_lines(run, state))]))
    return ExitCode.OK


def _stop_queued(run: RunDir) -> int:
    """Take a run's job out of Slurm's queue; one that has started meanwhile is stopped as any run."""
    job = queued.job_of(run)
    assert job is not None
    answer, why = queued.ask(job), ""
    if answer.waits:
        why = queued.cancel_waiting(job)
        if not why and queued.ask(job).state is None:
            print(
                "\n".join(
                    [f"Slurm job {job} is cancelled: it waited in the queue", *resume_lines(run, find_state(run))]
                )
            )
            return ExitCode.OK
    answer = queued.ask(job)
    if answer.works and not why:
        why = queued.stop_working(job)
    elif answer.heard and answer.state is None:
        print(f"nothing to stop: {find_state(run).text}")
        return ExitCode.OK
    if why or not answer.heard:
        text = f"Slurm job {job} cannot be stopped from here: {why or answer.text}"
        raise MachineError(Problem(text, tries=("the same command on a machine of the cluster",)), title="with Slurm")
    print(f"asked Slurm job {job} to stop: it finishes the step and saves", flush=True)
    if not _wait_for_end(run, _grace_s(run) + STOP_MARGIN_S):
        tries = (f"scancel {job}",)
        raise MachineError(Problem(f"it does not react: {find_state(run).text}", tries=tries), title="with stopping it")
    state = find_state(run)
    print("\n".join([state.text, *resume_lines(run, state)]))
    return ExitCode.OK


def _ask(run: RunDir, supervisor: Supervisor) -> str:
    """Ask the supervisor to stop, by a signal where one reaches it, else through the run folder; a sentence."""
    if supervisor.alive:
        try:
            os.kill(supervisor.pid, signal.SIGTERM)
            return f"asked process {supervisor.pid} to stop"
        except (ProcessLookupError, PermissionError):  # gone meanwhile, or somebody else's
            pass
    job = None if supervisor.here else queued.job_of(run)
    if job is not None and queued.ask(job).works and not queued.stop_working(job):
        return f"asked Slurm job {job} to stop"  # heard before ranks start, too, when nobody looks for files
    ask_by_file(run)
    return f"asked process {supervisor.pid} on {supervisor.host} to stop, by a file in the run folder"


def _force(run: RunDir, state: State) -> None:
    """After all patience: kill what is left here. Raises MachineError when that is not enough."""
    assert state.supervisor is not None
    if not state.supervisor.here:
        text = f"{state.supervisor.host} does not react: {find_state(run).text}"
        raise MachineError(Problem(text, tries=("the same command on that machine",)), title="with stopping it")
    left = kill_run(_run_id(run, state.supervisor))
    if left:
        raise MachineError(Problem(f"processes {left} do not die"))


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


VERBS = {"status": status, "logs": logs.logs, "stop": stop}
DESCRIPTIONS = {
    "status": "What runs are doing: all of them, or one in detail.",
    "logs": "The logs of ranks and hosts.",
    "stop": "Have a run save and end; once more ends it at once.",
}
