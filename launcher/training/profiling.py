"""`profile=TOOL`: a close look at some steps of some ranks, written to the run's profile/ folder.

A recorder is made on the ranks that record, when recording begins. Files appear whole or not at all: a run that is
stopped in the middle keeps what was recorded, one that crashes keeps nothing of it.
"""

from __future__ import annotations

import contextlib
import traceback
from contextlib import nullcontext
from typing import Any

from launcher.rundir import RunDir
from launcher.spec import ProfileConfig
from launcher.training.metriclog import MetricLog
from launcher.training.recorders import RECORDERS, Context, Recorder, Recording, span
from launcher.training.runtime import Rank
from launcher.training.timing import Stopwatch


class Profile:
    """Starts and stops this rank's recorder at the chosen steps; every rank makes the same calls."""

    def __init__(self, options: ProfileConfig, context: Context, watch: Stopwatch, log: MetricLog) -> None:
        self._options, self._context, self._watch, self._log = options, context, watch, log
        self._steps = range(0)  # to record
        self._begun: int | None = None  # first recorded step
        self._last = 0
        self._recorder: Recorder | None = None
        self._labels = contextlib.ExitStack()

    def choose(self, done: int, total: int) -> None:
        """Decide the steps, now that `done` of `total` are known; a warning when they never come."""
        options = self._options
        if options.name == "none" or done >= total:
            return
        steps = range(options.first_step, options.first_step + (1 if options.name == "deepspeed" else options.steps))
        if done < steps[0] and steps[-1] <= total:
            self._steps = steps
            return
        self._log.warn(f"profile={options.name} records nothing: {span(steps)} of a run from {done + 1} to {total}")

    def begin_step(self, step: int) -> None:
        """To be called before anything of the step happens."""
        if step not in self._steps:
            return
        if self._begun is None:
            self._begun = step
            if self._records_here():
                self._recorder = RECORDERS[self._options.name](self._context)
                self._watch.label = self._recorder.label
        if self._recorder is not None:
            self._labels.enter_context(self._recorder.label(f"step {step}"))

    def end_step(self, step: int) -> None:
        """To be called when the step is done on this rank."""
        self._labels.close()
        self._last = step
        if self._steps and step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what was recorded and tell of it; collective, and nothing when all is written."""
        if self._begun is None:
            return
        steps = range(self._begun, self._last + 1)
        self._steps, self._begun, self._watch.label = range(0), None, nullcontext
        written = self._context.rank.gather(self._stop(steps))
        for text in [one.failure for one in written if one.failure]:
            self._log.warn(text)
        paths = [path for one in written for path in one.paths]
        if paths:
            first = next(one for one in written if one.paths)
            shown = [str(path.relative_to(self._context.folder.parent)) for path in paths]
            numbers = first.numbers or {}
            self._log.event("profile", tool=self._options.name, paths=shown, open=first.open, **numbers)

    def _stop(self, steps: range) -> Recording:
        """What this rank wrote; a full disk, or a profiler's own mistake, must not end training."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return Recording()
        try:
            return recorder.stop(steps)
        except Exception as error:
            traceback.print_exc()  # to the rank's log
            text = f"profile={self._options.name} wrote nothing of rank {self._context.rank.rank}"
            return Recording(failure=f"{text}: {type(error).__name__}: {error}")

    def _records_here(self) -> bool:
        name, rank = self._options.name, self._context.rank.rank
        ranks = {"deepspeed": [0], "comms": [rank]}.get(name, self._options.ranks)  # a collective is every rank's
        return rank in ranks


def make_profile(
    options: ProfileConfig, run: RunDir, rank: Rank, engine: Any, watch: Stopwatch, log: MetricLog
) -> Profile:
    """The profile of a run; `choose` must be called before the first step."""
    return Profile(options, Context(run.profile, rank, engine), watch, log)
