"""From a plan to running ranks: hosts are reached, supplied and checked, the run folder is made, the data is read."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, cast

from launcher.errors import ExitCode, MachineError
from launcher.planning.command import with_port
from launcher.rundir import RunDir
from launcher.running import pdsh, slurm
from launcher.running.agent import Order
from launcher.running.child import run_to_end
from launcher.running.crew import Stopped
from launcher.running.fetch import fetch, from_hub
from launcher.running.folder import Folder, claim, write_files
from launcher.running.gather import gather, place
from launcher.running.journal import short_path
from launcher.running.orders import order_of
from launcher.running.preflight import fresh_port, preflight, reach, startable
from launcher.running.restart import Restart, next_plan
from launcher.running.stops import StopSignals
from launcher.running.supervise import supervise
from launcher.running.sync import sync
from launcher.running.together import is_together, run_together
from launcher.running.transport import Channel, Event, close_all, doors, open_channels
from launcher.spec import RunPlan
from launcher.streams import SafeStream, fitted

Channels = dict[str, Channel]  # by host
Started = Callable[[RunDir], None]
Settle = Callable[[RunPlan], None]


def run_plan(plan: RunPlan, *, config_yaml: str, overrides: Sequence[str], started: Started = lambda run: None) -> int:
    """Start `plan` on its hosts and stay until it has ended; the launcher's exit code.

    `started` is called when all checks are passed and ranks are about to start. Raises ConfigError or MachineError,
    with nothing written, when it cannot start.
    """
    if slurm.is_for_queue(plan):
        return slurm.submit(plan, overrides=overrides)
    startable(plan)
    if plan.transport == "pdsh":
        pdsh.check_pdsh(plan)
    out = cast(IO[str], SafeStream(sys.stdout))

    def work(plan: RunPlan, channels: Channels, inbox: queue.Queue[Event], settle: Settle) -> int:
        run = _Run(plan, channels, out, config_yaml, overrides, settle)
        try:
            return run.start(inbox, stop, started)
        except Stopped:
            return stop.exit_code

    with StopSignals() as stop:
        if is_together(plan):
            return run_together(plan, overrides, stop, out, work)
        inbox: queue.Queue[Event] = queue.Queue()
        channels = open_channels(plan, inbox)
        try:
            return work(plan, channels, inbox, lambda plan: None)
        finally:
            close_all(list(channels.values()))


class _Run:
    """A run on its hosts, from the checks on."""

    def __init__(
        self,
        plan: RunPlan,
        channels: Channels,
        out: IO[str],
        config_yaml: str,
        overrides: Sequence[str],
        settle: Settle,  # tells launchers on other nodes what has become of the plan
    ) -> None:
        self.plan, self.channels, self.out = plan, channels, out
        self._config_yaml, self._overrides, self._settle = config_yaml, overrides, settle
        self._folder: Folder | None = None
        self._shared: dict[str, bool] = {}

    def start(self, inbox: queue.Queue[Event], stop: StopSignals, started: Started) -> int:
        """Check, supply, make the folder, start; the exit code once all has ended."""
        notes: list[tuple[str, str]] = []
        self._supply(lambda: stop.count > 0)
        self.plan = preflight(
            self.plan, self.channels, lambda *note: notes.append(note), give_up=lambda: stop.count > 0
        )
        if stop.count:
            return stop.exit_code
        with claim(self.plan) as folder:
            self._folder, self.plan, run = folder, folder.plan, folder.run
            try:
                self._write()
            except MachineError:
                folder.give_back()
                raise
            print(fitted("\n".join(_greeting(self.plan, run, notes)), self.out), file=self.out, flush=True)
            code = check_data(run, stop, self.out)
            if code != ExitCode.OK:
                folder.give_back()
                return code
            self._settle(self.plan)
            started(run)
            return supervise(self.plan, self, self.channels, inbox, stop, self.out)

    def orders(self, plan: RunPlan) -> list[Order]:
        """What the agent of each host has to do, in the order of the plan."""
        run, cluster = RunDir(Path(plan.run_dir)), plan.config.cluster
        sent = (run.plan, run.ds_config, run.hostfile, run.path / "bad_rows.json")
        files = {path.name: path.read_text(encoding="utf-8") for path in sent if path.exists()}
        found = []
        for node_rank, host in enumerate(plan.hosts):
            lost_contact_s = None if self.channels[host.name].local else cluster.lost_contact_s
            there = {} if lost_contact_s is None or self._shared.get(host.name) else files
            found.append(order_of(plan, node_rank, files=there, lost_contact_s=lost_contact_s))
        return found

    def collect(self, unshared: Sequence[str], give_up: Callable[[], bool]) -> list[str]:
        """Fetch what was left on hosts that do not share the run folder; sentences about what could not be."""
        reached = {name: door for name, door in doors(self.plan).items() if not is_together(self.plan)}
        shared = {host.name: host.name not in unshared or host.name not in reached for host in self.plan.hosts}
        return gather(self.plan, reached, shared, self.out, give_up=give_up)

    def again(self, restart: Restart) -> RunPlan:
        """Prepare another start of the ranks, from a checkpoint, at a port that is free now."""
        assert self._folder is not None
        for name, channel in self.channels.items():
            if channel.over:
                self.channels[name] = channel.reopen() or channel
        renewed = next_plan(self.plan, restart, 0)
        place(renewed, self.channels, self._shared, self.out)
        self.plan = with_port(renewed, fresh_port(renewed, self.channels))
        self._folder.go_on(self.plan)
        self._write()
        self._settle(self.plan)
        return self.plan

    def _supply(self, give_up: Callable[[], bool]) -> None:
        """Bring to the hosts what they lack; the checks after it look at what is there then."""
        remote = any(not channel.local for channel in self.channels.values())
        if not remote and not from_hub(self.plan):
            return
        if remote:
            self._shared = reach(self.plan, self.channels, give_up=give_up)
            sync(self.plan, self.channels, self.out, give_up=give_up)
            place(self.plan, self.channels, self._shared, self.out, give_up=give_up)
        self.plan = fetch(self.plan, self.channels, self.out, give_up=give_up)

    def _write(self) -> None:
        run = RunDir(Path(self.plan.run_dir))
        write_files(run, self.plan, config_yaml=self._config_yaml, overrides=self._overrides)


def _greeting(plan: RunPlan, run: RunDir, notes: Sequence[tuple[str, str]]) -> list[str]:
    config = plan.config
    steps = "an unknown number of" if plan.batch.total_steps is None else f"{plan.batch.total_steps:,}"
    ranks = f"{plan.world_size} rank{'s' * (plan.world_size > 1)}"
    others = len(plan.hosts) - 3
    names = ", ".join(host.name for host in plan.hosts[:3]) + (f" and {others} more" if others > 0 else "")
    return [
        f"run     {short_path(run.path)}",
        f"plan    {config.model.name}, {config.tune.name} tuning, ZeRO {plan.zero_name}, {ranks} on "
        f"{names} ({plan.gpu_kind or plan.device}), {steps} steps",
        *(f"{about:<8}{text}" for about, text in notes),
        *(f"warning: {text}" for text in plan.warnings),
    ]


def check_data(run: RunDir, stop: StopSignals, out: IO[str]) -> int:
    """Read all rows and images in a process of its own; what it prints is passed on, its errors last."""
    argv = [sys.executable, "-m", "launcher.training", "check", "--plan", str(run.plan)]
    done = run_to_end(argv, give_up=lambda: stop.count > 0)
    print(done.stdout, end="", file=out, flush=True)
    print(fitted(done.stderr, sys.stderr), end="", file=SafeStream(sys.stderr), flush=True)
    if stop.count:
        return stop.exit_code
    return done.returncode if done.returncode >= 0 else ExitCode.INTERNAL
