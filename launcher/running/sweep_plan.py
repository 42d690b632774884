"""Decides every job of a sweep before the first starts, and looks whether this machine can run them."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from launcher.errors import ConfigError, LauncherError, MachineError, Problem
from launcher.planning import sweeps
from launcher.planning.plan import make_plan
from launcher.planning.sweeps import Job, Jobs
from launcher.running.facts import gather_facts
from launcher.running.preflight import preflight, startable
from launcher.running.transport import Channel, close_all, doors, open_channels
from launcher.spec import RunOptions, RunPlan

TELL_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A sweep of which every job is decided."""

    read: Jobs
    plans: dict[int, RunPlan]  # of the valid jobs, by number
    invalid: dict[int, LauncherError]
    folder: Path
    named: bool  # by the user; else the name is made from the time and gives way to another sweep's

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All of them."""
        return self.read.jobs


def plan_sweep(words: Sequence[str]) -> Planned:
    """Compose and plan every job; nothing is written.

    Raises ConfigError with the problems of all jobs when one is wrong, unless `sweep.skip_invalid` leaves it out.
    """
    now = datetime.now(timezone.utc)
    read = sweeps.read_jobs(words, _teller("read"))
    place = read.place
    named = place.dir is not None or place.name is not None
    folder = Path(place.dir or Path(place.root, place.name or f"{now:%Y%m%d-%H%M%S}-sweep")).absolute()
    if named and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        key = "run.dir" if place.dir else "run.name"
        problem = Problem(f"{folder} exists and is not empty; nothing is overwritten", tries=(f"{key}=ANOTHER",))
        raise ConfigError(problem, title="with this sweep")
    plans: dict[int, RunPlan] = {}
    invalid, tell = dict(read.invalid), _teller("planned")
    for number, composed in read.composed.items():
        own = RunOptions(root=composed.config.run.root, dir=str(folder / str(number)))
        config = replace(composed.config, run=own)
        try:
            plans[number] = make_plan(config, gather_facts(config), now=now)
        except ConfigError as error:
            invalid[number] = error
        tell(number + 1, len(read.jobs))
    if invalid and not (read.options.skip_invalid and plans):
        raise sweeps.refusal(read.jobs, invalid)
    return Planned(read=read, plans=plans, invalid=invalid, folder=folder, named=named)


def _teller(what: str) -> Callable[[int, int], None]:
    """Says now and then how far the planning of many jobs is; beside the plan, not in it."""
    last = time.monotonic()

    def tell(done: int, count: int) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_EVERY_S and done < count:
            last = time.monotonic()
            print(f"{what} {done} of {count} jobs", file=sys.stderr, flush=True)

    return tell


def check_machine(planned: Planned) -> None:
    """What each job would check for itself, hours from now; jobs on the same hosts share their connections."""
    errors: dict[int, LauncherError] = {}
    channels: dict[str, dict[str, Channel]] = {}
    try:
        for number, plan in planned.plans.items():
            try:
                startable(plan)
                way = repr(doors(plan))
                if way not in channels:
                    channels[way] = open_channels(plan, queue.Queue())
                preflight(plan, channels[way])
            except LauncherError as error:
                errors[number] = error
    finally:
        close_all([channel for opened in channels.values() for channel in opened.values()])
    if errors:
        kind = ConfigError if any(isinstance(error, ConfigError) for error in errors.values()) else MachineError
        raise kind(*sweeps.grouped([j for j in planned.jobs if j.number in planned.plans], errors))
