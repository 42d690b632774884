"""Starts a run, watches it, ends it when asked or when a rank fails, and says what became of it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, cast

from launcher.errors import ExitCode, MachineError
from launcher.planning.command import node_launcher_argv
from launcher.rundir import RunDir, append_json
from launcher.running.agent import Order, kill_run
from launcher.running.folder import claim, write_files
from launcher.running.journal import short_path
from launcher.running.outcome import render_end, write_outcome
from launcher.running.preflight import preflight
from launcher.running.progress import Display, Progress, make_display
from launcher.running.tracking import Tracking
from launcher.running.transport import LOST, Event, Link, find_transport
from launcher.running.verdict import Tally, judge, signal_name
from launcher.spec import RunPlan
from launcher.streams import SafeStream

TICK_S = 0.25
STUCK_S = 40.0  # an agent that was told to kill and does not report is ended too
REPORT_S = 600.0  # for the page of a run of weeks


def run_plan(plan: RunPlan, *, config_yaml: str, overrides: Sequence[str]) -> int:
    """Start `plan` on this machine and stay until it has ended; the launcher's exit code.

    Raises ConfigError or MachineError, with nothing written, when it cannot start.
    """
    find_transport(plan.config.cluster.transport)
    plan = preflight(plan)
    out = cast(IO[str], SafeStream(sys.stdout))
    with StopSignals() as stop, claim(plan) as folder:
        run, plan = folder.run, folder.plan
        try:
            write_files(run, plan, config_yaml=config_yaml, overrides=overrides)
        except MachineError:
            folder.give_back()
            raise
        print("\n".join(_greeting(plan, run)), file=out, flush=True)
        code = check_data(run, stop, out)
        if code != ExitCode.OK:
            folder.give_back()
            return code
        return supervise(make_order(plan), stop, out, metric=plan.config.eval.metric)


def _greeting(plan: RunPlan, run: RunDir) -> list[str]:
    config = plan.config
    steps = "an unknown number of" if plan.batch.total_steps is None else f"{plan.batch.total_steps:,}"
    return [
        f"run     {short_path(run.path)}",
        f"plan    {config.model.name}, {config.tune.name} tuning, ZeRO {config.zero.name}, {plan.world_size} ranks on "
        f"{plan.hosts[0].name} ({plan.gpu_kind or plan.device}), {steps} steps",
        *(f"warning: {text}" for text in plan.warnings),
    ]


def make_order(plan: RunPlan) -> Order:
    """What the agent of this machine, the plan's only host, has to do."""
    host = plan.hosts[0]
    return Order(
        run_id=plan.run_id,
        host=host.name,
        run_dir=plan.run_dir,
        cwd=os.getcwd(),
        argv=list(node_launcher_argv(plan, 0, plan.config.cluster.python or sys.executable)),
        env=dict(plan.env),
        ranks=list(range(host.slots)),
        stop_grace_s=plan.config.cluster.stop_grace_s,
        monitor_every_s=plan.config.logging.monitor_every_s,
        gpus=list(host.gpus) if plan.device == "cuda" else [],
    )


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered: the first asks for a stop, the second for an end."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in self.NUMBERS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run outlives its terminal
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """The launcher's exit code after the stop that was asked for."""
        return ExitCode.INTERRUPTED if self.first == signal.SIGINT else ExitCode.TERMINATED

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)


def check_data(run: RunDir, stop: StopSignals, out: IO[str]) -> int:
    """Read all rows and images in a process of its own; what it prints is passed on, its errors last."""
    argv = [sys.executable, "-m", "launcher.training", "check", "--plan", str(run.plan)]
    done = run_to_end(argv, give_up=lambda: stop.count > 0)
    print(done.stdout, end="", file=out, flush=True)
    print(done.stderr, end="", file=SafeStream(sys.stderr), flush=True)
    if stop.count:
        return stop.exit_code
    return done.returncode if done.returncode >= 0 else ExitCode.INTERNAL


def run_to_end(argv: list[str], give_up: Callable[[], bool]) -> subprocess.CompletedProcess[str]:
    """Run a command, killed once `give_up` says so.

    In a session of its own, so that Ctrl-C reaches it only through us.
    """
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=null, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:
        while True:
            try:
                said, errors = process.communicate(timeout=TICK_S)
                return subprocess.CompletedProcess(argv, process.returncode, said, errors)
            except subprocess.TimeoutExpired:
                if give_up():
                    process.kill()


def supervise(order: Order, stop: StopSignals, out: IO[str], *, metric: str) -> int:
    """Start the agent of this machine with `order`, watch the run to its end, write outcome.json."""
    run, started = RunDir(Path(order.run_dir)), time.time()
    tally = Tally(run, len(order.ranks))
    display = make_display(out)
    tracking = Tracking.start(run)
    try:
        _watch(order, tally, stop, display)
    finally:
        display.close()
    verdict = judge(tally, stop.first)
    try:
        write_outcome(run, verdict, tally, started=started, ended=time.time(), metric=metric)
    except OSError as error:  # a full disk must not hide the verdict
        print(f"{short_path(run.outcome)} cannot be written: {error}", file=out)
    asked = min(stop.count, 1)  # after that, each signal more says that nobody wants to wait

    def in_a_hurry() -> bool:
        return stop.count > asked

    for sentence in [*tracking.finish(in_a_hurry), *make_report(run, in_a_hurry)]:
        print(sentence, file=out)
    print(render_end(run, verdict, tally, metric), file=out, flush=True)
    return int(verdict.exit_code)


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


def _watch(order: Order, tally: Tally, stop: StopSignals, display: Display) -> None:
    events: queue.Queue[Event] = queue.Queue()
    progress = Progress(tally.run, display)
    link = find_transport("local")(order.host, events, log=tally.run.node_log(order.host))
    link.send(asdict(order))
    asked = _Asked(link, stop, order.stop_grace_s, display.say)
    samples = _Samples(tally.run, progress, display.say)
    over = False
    while not over:
        for event in _wait(events):
            tally.add(event)
            samples.take(event)
            over = over or event["event"] in ("done", LOST)
            if event["event"] == "ending" and event["why"] == "failure":
                display.say("a rank has failed: ending the others")
        asked.pass_on()
        progress.update(tally.statuses)
    if tally.lost:  # the kernel has killed its node launcher and ranks; helper processes may be left
        tally.survivors += kill_run(order.run_id)
    link.close()


class _Samples:
    """Keeps what monitors see: every look in monitor.jsonl, the last of each host for the display."""

    def __init__(self, run: RunDir, progress: Progress, say: Callable[[str], None]) -> None:
        self._run, self._progress, self._say = run, progress, say
        self._told = False

    def take(self, event: Event) -> None:
        """Take in one event of an agent; all but a monitor's are passed over."""
        host = event["host"]
        if event["event"] == "monitor_lost":
            self._say(f"warning: {host} is no longer monitored: {event['why']}")
        if event["event"] != "monitor":
            return
        line = {"time": event["time"], "host": host, **event["sample"]}
        self._progress.take_sample(host, line)
        try:
            append_json(self._run.monitor, line)
        except OSError as error:  # a full disk must not end supervision
            if not self._told:
                self._say(f"warning: {short_path(self._run.monitor)} cannot be written: {error}")
            self._told = True


class _Asked:
    """Passes requests to stop on to the agent, once each."""

    def __init__(self, link: Link, stop: StopSignals, grace_s: float, say: Callable[[str], None]) -> None:
        self._link, self._stop, self._grace_s, self._say = link, stop, grace_s, say
        self._passed = 0
        self._kill_sent: float | None = None

    def pass_on(self) -> None:
        if self._stop.count >= 1 and self._passed == 0:
            name = self._stop.first.name if self._stop.first else ""
            self._say(f"{name}: finishing the step and saving, at most {self._grace_s:.0f} s; once more ends at once")
            self._link.send({"do": "stop"})
            self._passed = 1
        if self._stop.count >= 2 and self._passed == 1:
            self._say("ending at once")
            self._link.send({"do": "kill"})
            self._passed, self._kill_sent = 2, time.monotonic()
        if self._kill_sent is not None and time.monotonic() - self._kill_sent > STUCK_S:
            self._link.process.kill()


def _wait(events: queue.Queue[Event]) -> list[Event]:
    """What arrives within a tick."""
    found: list[Event] = []
    try:
        found.append(events.get(timeout=TICK_S))
        while True:
            found.append(events.get_nowait())
    except queue.Empty:
        return found
