"""Sees a run through: watches its ranks, starts them again where that can help, says what became of it."""

from __future__ import annotations

import dataclasses
import queue
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from launcher.errors import ExitCode, LauncherError
from launcher.rundir import RunDir
from launcher.running.agent import Order
from launcher.running.attempt import watch
from launcher.running.causes import signal_name
from launcher.running.child import TICK_S, run_to_end
from launcher.running.journal import short_path
from launcher.running.notify import notify
from launcher.running.outcome import last_checkpoint, render_end, steps_done, write_outcome
from launcher.running.pdsh import runner_of
from launcher.running.progress import make_display
from launcher.running.restart import Attempt, Restart, decide, find_relief, note_restart, relief_text, summary
from launcher.running.stops import StopSignals
from launcher.running.supervisor import asked_by_file
from launcher.running.tracking import Tracking
from launcher.running.transport import Channel, Event, close_all
from launcher.running.verdict import Tally, Verdict, judge
from launcher.spec import RunPlan

REPORT_S = 600.0  # for the page of a run of weeks


class Means(Protocol):
    """What whoever has prepared a run can do for it."""

    def orders(self, plan: RunPlan) -> Sequence[Order]:
        """What the agent of each host has to do."""

    def collect(self, unshared: Sequence[str], give_up: Callable[[], bool]) -> list[str]:
        """Fetch results from hosts that do not share the run folder; sentences about what could not be fetched."""

    def again(self, restart: Restart) -> RunPlan:
        """Prepare another start of the same run."""


def supervise(
    plan: RunPlan,
    means: Means,
    channels: dict[str, Channel],
    inbox: queue.Queue[Event],
    stop: StopSignals,
    out: IO[str],
) -> int:
    """Give the agents of a plan their orders, watch the run to its end, write outcome.json; the exit code.

    The channels are closed on return.
    """
    run, config = RunDir(Path(plan.run_dir)), plan.config
    metric, most = config.metric, config.restart.max
    tracking = Tracking.start(run)
    display = make_display(out)
    attempts: list[Attempt] = []
    sentences: list[str] = []
    try:
        while True:
            started, before = time.time(), last_checkpoint(run)
            tally = Tally.of(run, plan.hosts, master_addr=plan.master_addr, port=plan.master_port)
            with runner_of(plan) as poll:
                hang_s, orders = config.cluster.hang_s, means.orders(plan)
                unshared = watch(orders, channels, inbox, tally, stop, display, hang_s=hang_s, poll_runner=poll)
            sentences = means.collect(unshared, stop.hurry())
            verdict = judge(tally, stop.first)
            if sentences and verdict.exit_code == ExitCode.OK:  # trained, and not all of it is here
                verdict = dataclasses.replace(verdict, exit_code=int(ExitCode.MACHINE))
            _write_outcome(run, verdict, tally, started, metric, len(attempts) + 1, display.say)
            step = steps_done(run, tally.statuses)
            relief = find_relief(plan, verdict, run)
            attempts.append(
                Attempt(verdict=verdict, step=step, before=before, after=last_checkpoint(run), relief=relief)
            )
            restart = decide(attempts, most)
            if not isinstance(restart, Restart):
                break
            note_restart(run, restart, most)
            changed = relief_text(restart.relief)
            display.say(f"{restart.why}: restart {restart.number} of {most} in {restart.wait_s:.0f} s{changed}")
            if not _wait_out(restart.wait_s, stop, run):
                restart = "a stop was asked for"
                break
            try:
                plan = means.again(restart)
            except LauncherError as error:
                restart = str(error.problems[0].text if error.problems else error)
                break
    finally:
        display.close()
        close_all(list(channels.values()))  # nothing of the run stays on the hosts while reports are written here
    in_a_hurry = stop.hurry()
    told = notify(config.notify.command, run, in_a_hurry)
    for sentence in [*sentences, *tracking.finish(in_a_hurry), *make_report(run, in_a_hurry), *told]:
        print(sentence, file=out)
    print(render_end(run, verdict, tally, metric, summary(attempts, most, restart)), file=out, flush=True)
    return int(verdict.exit_code)


def _write_outcome(
    run: RunDir, verdict: Verdict, tally: Tally, started: float, metric: str, attempt: int, say: Callable[[str], None]
) -> None:
    try:
        write_outcome(run, verdict, tally, started=started, ended=time.time(), metric=metric, attempt=attempt)
    except OSError as error:  # a full disk must not hide the verdict
        say(f"{short_path(run.outcome)} cannot be written: {error}")


def _wait_out(seconds: float, stop: StopSignals, run: RunDir) -> bool:
    """Wait before a restart; false when a stop is asked for meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not stop.count:
        time.sleep(TICK_S)
        stop.add_by_file(asked_by_file(run))
    return not stop.count


def make_report(run: RunDir, in_a_hurry: Callable[[], bool]) -> list[str]:
    """Write report.html of a run or sweep; a sentence when that fails.

    By a process of its own: the page of a long run may take minutes or all memory, and what is through must not fail
    for its page.
    """
    try:
        why = _report_failure(run, in_a_hurry)
    except OSError as error:  # no more processes
        why = str(error)
    return [f"no report: {why}   (python -m launcher report {short_path(run.path)})"] if why else []


def _report_failure(run: RunDir, in_a_hurry: Callable[[], bool]) -> str:
    argv, deadline = [sys.executable, "-m", "launcher", "report", str(run.path)], time.monotonic() + REPORT_S
    done = run_to_end(argv, give_up=lambda: in_a_hurry() or time.monotonic() > deadline)
    if done.returncode < 0:
        return f"its process was ended by {signal_name(-done.returncode)}"
    lines = [line.strip() for line in done.stderr.splitlines()]
    # A problem begins with its title; a traceback comes before what is said of a mistake of the launcher.
    return " ".join(lines[:2] if done.returncode != ExitCode.INTERNAL else lines[-2:]) if done.returncode else ""
