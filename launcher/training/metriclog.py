"""metrics.jsonl and events.jsonl: what training measured and what happened, one JSON object a line.

A phase is noted in each rank's state file as well, in the same call, so that the two cannot tell different stories.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from launcher.rundir import RunDir, append_json
from launcher.streams import printable
from launcher.training.rankstatus import Item, RankStatus


class MetricLog:
    """Appends lines to the files of a run; ranks other than 0 keep their state file and write nothing else.

    Readers must take the last line of a step: a run resumed from an earlier checkpoint writes the
    steps after it again, behind an event `resumed`.
    """

    def __init__(self, run: RunDir, rank: int, status: RankStatus) -> None:
        self._run, self._status = run, status
        self._writes = rank == 0
        self._phase: str | None = None

    def phase(self, name: str, *, state: str | None = None, step: int | None = None) -> None:
        """Where this rank is now: an event for each change, so that differences of times are durations."""
        changed, self._phase = name != self._phase, name
        self._status.update(phase=name, state=state, step=step)
        if changed:
            self.event("phase", phase=name)

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, with a sign of progress before each (`RankStatus.each`)."""
        return self._status.each(items)

    def step(
        self,
        *,
        step: int,
        total_steps: int,
        epoch: float,
        loss: float,
        lr: float,
        grad_norm: float | None,
        queries_per_s: float,
        tokens_per_s: float,
        step_s: float,
        skipped: int,
        bad_steps: int,
        loss_scale: float | None,
        micro_steps: int,
        timings: Mapping[str, Any],
    ) -> None:
        """One optimizer step; `skipped` counts steps so far whose gradient was not finite, `bad_steps` these and
        those whose loss was not finite or exactly 0. `loss_scale` is that of fp16.

        `timings` are the fields of `launcher.training.timing.over_ranks`.
        """
        line: dict[str, Any] = {
            "kind": "step",
            "step": step,
            "total_steps": total_steps,
            "epoch": epoch,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "queries_per_s": queries_per_s,
            "tokens_per_s": tokens_per_s,
            "step_s": step_s,
            "skipped": skipped,
            "bad_steps": bad_steps,
            **({} if loss_scale is None else {"loss_scale": loss_scale}),
            "micro_steps": micro_steps,
            **timings,
        }
        self._append_metrics(line)
        self._print(f"step {step}/{total_steps}  loss {loss:.4f}  lr {lr:.2e}  {queries_per_s:.1f} queries/s")

    def evaluation(self, *, step: int, metrics: Mapping[str, float], groups: int) -> None:
        """The numbers of one evaluation, taken after `step` optimizer steps."""
        self._append_metrics({"kind": "eval", "step": step, **metrics, "groups": groups})
        self._print(f"step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))

    def event(self, event: str, **fields: Any) -> None:
        """Something that happened: checkpoint, export, stop_requested, resumed, profile; see also `phase`, `warn`."""
        if self._writes:
            append_json(self._run.events, {"time": time.time(), "event": event, **_plain(fields)})

    def warn(self, text: str) -> None:
        """Something to be looked at, in every rank's log and as rank 0's event."""
        print(f"warning: {printable(text)}", flush=True)
        self.event("warning", text=text)

    def _print(self, line: str) -> None:
        """To the rank's log, for whoever follows it."""
        if self._writes:
            print(line, flush=True)

    def _append_metrics(self, line: dict[str, Any]) -> None:
        if self._writes:
            append_json(self._run.metrics, {**_plain(line), "time": time.time()})


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    # JSON has no NaN or infinity; a line with one would be unreadable to every strict parser.
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }
