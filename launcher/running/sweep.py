"""Runs the jobs of a sweep one after another, each as a process of its own; everything is planned before the first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, cast

from launcher.errors import ConfigError, ExitCode, MachineError, Problem
from launcher.planning import grammar, sweeps
from launcher.planning.memory import disk_bytes
from launcher.planning.sweeps import Job
from launcher.rundir import SWEEP, RunDir, write_atomic, write_json
from launcher.running.agent import bound_to, find_run, kill_run
from launcher.running.child import TICK_S
from launcher.running.folder import make_new
from launcher.running.journal import short_path
from launcher.running.results import best_line, read_ending, read_numbers, result_line, result_table
from launcher.running.stops import StopSignals
from launcher.running.supervise import make_report
from launcher.running.supervisor import read_supervisor, write_supervisor
from launcher.running.sweep_plan import Planned, check_machine, plan_sweep
from launcher.streams import SafeStream

STUCK_S = 60.0  # a job that was told twice to end and does not is killed
TABLE = "table.txt"


def run_sweep(words: Sequence[str], command: Sequence[str]) -> int:
    """Plan all jobs, run each by `command`, which reads its words as JSON from standard input; the exit code.

    Raises ConfigError or MachineError, with nothing written, when a job could not start.
    """
    planned = plan_sweep(words)
    check_machine(planned)
    out = cast(IO[str], SafeStream(sys.stdout))
    with StopSignals() as stop:
        return Sweep(planned, command, stop, out).run()


class Sweep:
    """A sweep at work."""

    def __init__(self, planned: Planned, command: Sequence[str], stop: StopSignals, out: IO[str]) -> None:
        self.planned = planned
        self.command = list(command)
        self.stop = stop
        self.out = out
        self.metric = planned.read.metric
        self.environment = dict(os.environ)  # the same for every job
        self.folder = RunDir(_make_folder(planned))
        self.entries = [_entry(job, planned) for job in planned.jobs]
        self.data: dict[str, Any] = {
            "status": "running",
            "exit_code": None,
            "started": _now(),
            "ended": None,
            "metric": self.metric,
            "stop_grace_s": max(plan.config.cluster.stop_grace_s for plan in planned.plans.values()),
            "jobs": self.entries,
        }

    def run(self) -> int:
        """Run what is valid and say what became of it."""
        try:
            write_supervisor(self.folder, f"sweep-{os.getpid()}-{time.time_ns()}")
            write_json(self.folder.path / SWEEP, self.data)
        except OSError as error:
            problem = Problem(f"the sweep folder cannot be written: {error}", tries=("run.root=FOLDER",))
            raise MachineError(problem, title="with this machine") from None
        self._say(*_greeting(self.planned, self.folder))
        go_on = True
        for job, entry in zip(self.planned.jobs, self.entries, strict=True):
            if entry["status"] == "invalid":
                continue
            if not go_on or self.stop.count:
                entry["status"] = "not started"
                continue
            clean = self._run_job(job, entry)
            failed = entry["status"] != "done" and self.planned.read.options.fail_fast
            go_on = clean and not failed
        return self._end()

    def _run_job(self, job: Job, entry: dict[str, Any]) -> bool:
        """Run one job to its end; whether nothing of it is left."""
        run, started = RunDir(self.folder.path / entry["folder"]), time.monotonic()
        self._say("", f"job {job.number}   {job.title}   ({job.number + 1} of {len(self.entries)})")
        entry["status"] = "running"
        self._save()
        words = [*job.own_words, f"run.dir={grammar.as_typed(str(run.path))}"]
        code = self._wait(start(self.command, words, self.environment))
        left = self._clear(run)
        entry["status"], entry["reason"] = read_ending(run, code)
        entry.update(exit_code=code, seconds=round(time.monotonic() - started, 1))
        entry["numbers"] = self._numbers(run)
        self._save()
        self._say(result_line(entry, self.metric))
        if left:
            self._say(f"processes {left} of it do not die, so no other job is started")
        return not left

    def _numbers(self, run: RunDir) -> dict[str, float | None]:
        """What the job reached; nothing, with a sentence, when its files hold what cannot be added up."""
        try:
            return read_numbers(run, self.metric)
        except Exception as error:  # the other jobs must not pay for it
            self._say(f"no numbers: {type(error).__name__}: {error}")
            return {}

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code of a job; each request to stop is passed on once."""
        passed, last = 0, time.monotonic()
        while True:
            try:
                return process.wait(timeout=TICK_S)
            except subprocess.TimeoutExpired:
                pass
            if self.stop.count > passed:  # one a tick: two equal signals at once would arrive as one
                passed, last = passed + 1, time.monotonic()
                process.send_signal(signal.SIGINT if self.stop.first == signal.SIGINT else signal.SIGTERM)
            elif passed >= 2 and time.monotonic() - last > STUCK_S:
                process.kill()

    def _clear(self, run: RunDir) -> list[int]:
        """End what outlives its launching process, after time to save; the process ids that do not die."""
        supervisor = read_supervisor(run)
        left = find_run(supervisor.run_id) if supervisor else []
        if supervisor is None or not left:
            return []
        grace_s = self.data["stop_grace_s"]
        self._say(f"{len(left)} processes of this job outlive it: they may save and end, at most {grace_s:.0f} s")
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and self.stop.count < 2 and find_run(supervisor.run_id):
            time.sleep(TICK_S)
        if find_run(supervisor.run_id):
            self._say("they are killed")
        return kill_run(supervisor.run_id)

    def _end(self) -> int:
        code = exit_code(self.entries, self.stop)
        done = sum(entry["status"] == "done" for entry in self.entries)
        status = "done" if done == len(self.entries) else "stopped" if self.stop.count else "failed"
        self.data.update(status=status, exit_code=code, ended=_now())
        self._save()
        lines = result_table(self.data, self.folder)
        self._say("", *lines, "", f"{done} of {len(self.entries)} jobs are done")
        try:
            write_atomic(self.folder.path / TABLE, "\n".join([*lines, ""]))
        except OSError:
            pass  # sweep.json was refused too, and said so
        self._say(f"  sweep   {short_path(self.folder.path)}", *best_line(self.data, self.folder))
        asked = self.stop.count
        report = f"  report  {short_path(self.folder.report)}"
        self._say(*(make_report(self.folder, lambda: self.stop.count > asked) or [report]))
        return code

    def _save(self) -> None:
        try:
            write_json(self.folder.path / SWEEP, self.data)
        except OSError as error:  # a full disk must not end the jobs
            self._say(f"{short_path(self.folder.path / SWEEP)} cannot be written: {error}")

    def _say(self, *lines: str) -> None:
        print("\n".join(lines), file=self.out, flush=True)  # before a job writes to the same terminal


def start(command: Sequence[str], words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a job; its words may hold secrets, so that they go where no other user can see them."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches it only through us, once
        preexec_fn=bound_to(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 (a sweep has one thread)
    )
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(json.dumps(list(words)).encode())
    except BrokenPipeError:
        pass  # it has ended already; its exit code tells
    return process


def exit_code(entries: Sequence[Mapping[str, Any]], stop: StopSignals) -> int:
    """0 when all jobs are done, the failures' common exit code, or 4; that of the stop when the sweep was stopped."""
    if all(entry["status"] == "done" for entry in entries):
        return ExitCode.OK
    if stop.count:
        return stop.exit_code
    codes = {
        # Killed by a signal, or 0 without an outcome: it did not train what was asked.
        entry["exit_code"] if entry["exit_code"] > 0 else ExitCode.TRAINING
        for entry in entries
        if entry["status"] in ("stopped", "failed", "invalid")
    }
    return int(codes.pop()) if len(codes) == 1 else ExitCode.TRAINING


def _make_folder(planned: Planned) -> Path:
    """Make the folder of the sweep; two sweeps never share one. ConfigError or MachineError when it cannot be."""
    path = planned.folder
    try:
        if not planned.named:
            return make_new(path)
        path.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path / ".lock", os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        problem = Problem(f"{path} was taken by another start", tries=("run.name=ANOTHER",))
        raise ConfigError(problem, title="with this sweep") from None
    except OSError as error:
        problem = Problem(f"the sweep folder cannot be made: {error}", tries=("run.root=FOLDER",))
        raise MachineError(problem, title="with this machine") from None
    return path


def _entry(job: Job, planned: Planned) -> dict[str, Any]:
    """One job as sweep.json has it."""
    error = planned.invalid.get(job.number)
    composed = planned.read.composed.get(job.number)
    return {
        "number": job.number,
        "folder": str(job.number),
        "differs": dict(job.differs),
        "words": list(composed.overrides) if composed else [],  # secrets masked
        "status": "invalid" if error else "waiting",
        "exit_code": int(error.exit_code) if error else None,
        "reason": error.problems[0].text if error else "",
        "numbers": {},
        "seconds": None,
    }


def _greeting(planned: Planned, folder: RunDir) -> list[str]:
    count, invalid = len(planned.plans), planned.invalid
    lines = [f"sweep   {short_path(folder.path)}", f"jobs    {count}, one after another"]
    if not planned.read.swept:
        lines.append("notice: nothing is swept, so this is one job; several values are typed KEY=VALUE,VALUE")
    lines += [f"left out: {problem.text}" for problem in sweeps.grouped(planned.jobs, invalid)]
    needed = sum(disk_bytes(plan) for plan in planned.plans.values())
    free = shutil.disk_usage(folder.path).free
    if needed > free:
        lines.append(
            f"warning: checkpoints and exports of all jobs need about {needed / 1e9:,.1f} GB, "
            f"and {free / 1e9:,.1f} GB are free (checkpoint.keep_last=1, checkpoint.export=false)"
        )
    return lines


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
