"""Whether a run that has failed is started again, and from where. Pure but for `note_restart`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.planning.command import with_port
from launcher.rundir import RunDir, append_json
from launcher.running.verdict import Verdict
from launcher.spec import RunPlan

WAIT_S = (5.0, 15.0, 45.0)  # before each restart, for hosts to recover; the last one goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the ranks and how it ended."""

    verdict: Verdict
    step: int  # the last one taken
    before: Path | None  # the newest whole checkpoint when it began
    after: Path | None  # and when it ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """A start that is worth trying."""

    number: int  # 1 is the first restart
    wait_s: float
    checkpoint: Path
    why: str  # what had failed


def decide(attempts: Sequence[Attempt], most: int) -> Restart | str:
    """What to do after the last of `attempts`, all of one run: another start, or why there is none.

    `most` is `restart.max`. The reason is empty where nobody expects a restart.
    """
    last, done = attempts[-1], len(attempts) - 1
    if most == 0 or last.verdict.status != "failed":
        return ""
    first = last.verdict.failures[0]
    if not first.cause.retry:
        return f"the same would happen again ({first.cause.name.replace('_', ' ')})"
    if done and _same(attempts[-2], last):
        return f"the last start failed in the same way, also after step {last.step}"
    if last.after is None or last.after == last.before:
        return "no checkpoint was saved since the last start"
    if done >= most:
        return f"restart.max={most} is reached"
    wait_s = WAIT_S[min(done, len(WAIT_S) - 1)]
    return Restart(number=done + 1, wait_s=wait_s, checkpoint=last.after, why=first.headline())


def _same(one: Attempt, other: Attempt) -> bool:
    causes = [attempt.verdict.failures[0].cause.name if attempt.verdict.failures else None for attempt in (one, other)]
    return causes[0] == causes[1] and one.step == other.step


def next_plan(plan: RunPlan, restart: Restart, port: int) -> RunPlan:
    """The plan of the next start. `plan` is that of the first start, whose run id each restart makes longer.

    A run id of its own: what an unreachable host may still run must not be taken for the new ranks.
    """
    run_id = f"{plan.run_id}.{restart.number}"
    return with_port(dataclasses.replace(plan, run_id=run_id, resume_from=str(restart.checkpoint)), port)


def restarts_of(run_id: str) -> int:
    """How many restarts came before the start with this run id.

    Example:
        >>> restarts_of("20260101-120000-abc123"), restarts_of("20260101-120000-abc123.2")
        (0, 2)
    """
    number = run_id.rpartition(".")[2] if "." in run_id else "0"
    return int(number) if number.isdigit() else 0


def note_restart(run: RunDir, restart: Restart, most: int) -> None:
    """Write the event `restart`."""
    event = {"time": time.time(), "event": "restart", "number": restart.number, "of": most}
    append_json(run.events, event | {"path": str(restart.checkpoint), "wait_s": restart.wait_s, "why": restart.why})


def summary(attempts: Sequence[Attempt], most: int, why_not: str) -> str:
    """What the verdict says of restarts; empty when there is nothing to say."""
    done = len(attempts) - 1
    times = f"restarted {done} of {most} times" if done else "not restarted" if why_not else ""
    return times + (f"{', not again' if done else ''}: {why_not}" if why_not else "")
