"""Whether a run that has failed is started again, and from where. Pure but for `note_restart`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.arithmetic import smaller_micro_batch
from launcher.plain import to_data
from launcher.planning.command import with_port
from launcher.rundir import RunDir, append_json, read_json
from launcher.running.verdict import Verdict
from launcher.spec import RunPlan

WAIT_S = (5.0, 15.0, 45.0)  # before each restart, for hosts to recover; the last one goes on
RELIEF_S = 1.0  # nothing has to recover


@dataclass(frozen=True, kw_only=True, slots=True)
class Relief:
    """Smaller micro-batches, or more layers recomputed: less memory, and the same loss."""

    max_tokens: int
    checkpointed_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the ranks and how it ended."""

    verdict: Verdict
    step: int  # the last one taken
    before: Path | None  # the newest whole checkpoint when it began
    after: Path | None  # and when it ended
    relief: Relief | str | None = None  # after too little GPU memory: what to change, or why nothing can be


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """A start that is worth trying."""

    number: int  # 1 is the first restart
    wait_s: float
    checkpoint: Path | None  # None: from the beginning
    why: str  # what had failed
    relief: Relief | None = None


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
    if isinstance(last.relief, str):
        return last.relief
    if last.relief is None and done and _same(attempts[-2], last):
        return f"the last start failed in the same way, also after step {last.step}"
    if last.relief is None and (last.after is None or last.after == last.before):
        return "no checkpoint was saved since the last start"
    if done >= most:
        return f"restart.max={most} is reached"
    wait_s = RELIEF_S if last.relief else WAIT_S[min(done, len(WAIT_S) - 1)]
    return Restart(number=done + 1, wait_s=wait_s, checkpoint=last.after, why=first.reason(), relief=last.relief)


def find_relief(plan: RunPlan, verdict: Verdict, run: RunDir) -> Relief | str | None:
    """What makes a run that had too little GPU memory fit: micro-batches of three quarters of the tokens that were too
    many, as long as they hold the longest row; then every decoder layer recomputed. A sentence when neither helps, None
    for other failures. The loss of a step is the same however it is divided (training.engine.optimizer_step)."""
    first = verdict.failures[0] if verdict.status == "failed" else None
    if first is None or first.cause.name != "gpu_memory":
        return None
    tokens = ((first.error or {}).get("details") or {}).get("tokens")
    limit = plan.batch.max_tokens
    if not tokens:
        return "the GPU's memory ended before the first micro-batch, and a smaller one changes nothing"
    smaller = smaller_micro_batch(limit, int(tokens))
    if smaller >= _longest(plan, run):
        return Relief(max_tokens=smaller, checkpointed_layers=plan.checkpointed_layers)
    if plan.checkpointed_layers < plan.layers:
        return Relief(max_tokens=limit, checkpointed_layers=plan.layers)
    return f"batch.max_tokens={limit} cannot be smaller and still hold the longest row, and all layers are recomputed"


def _longest(plan: RunPlan, run: RunDir) -> int:
    """Tokens that a micro-batch must hold: of the longest row, or of one prompt where a row may be split."""
    limit = plan.config.dataset.max_length
    try:
        longest = int(read_json(run.data)["train"]["lengths"]["longest"]["tokens"])
    except (OSError, ValueError, KeyError, TypeError):  # it ended before its rows were counted
        return limit
    return longest if plan.config.whole_groups else min(longest, limit)


def _same(one: Attempt, other: Attempt) -> bool:
    causes = [attempt.verdict.failures[0].cause.name if attempt.verdict.failures else None for attempt in (one, other)]
    return causes[0] == causes[1] and one.step == other.step


def relief_text(relief: Relief | None) -> str:
    """What a relief changes, to be said behind a restart; empty without one."""
    if relief is None:
        return ""
    return f", with micro-batches of {relief.max_tokens:,} tokens and {relief.checkpointed_layers} layers recomputed"


def next_plan(plan: RunPlan, restart: Restart, port: int) -> RunPlan:
    """The plan of the next start. `plan` is that of the first start, whose run id each restart makes longer.

    A run id of its own: what an unreachable host may still run must not be taken for the new ranks.
    """
    run_id, relief = f"{plan.run_id}.{restart.number}", restart.relief
    resume_from = plan.resume_from if restart.checkpoint is None else str(restart.checkpoint)
    if relief is not None:
        batch = dataclasses.replace(plan.batch, max_tokens=relief.max_tokens)
        plan = dataclasses.replace(plan, batch=batch, checkpointed_layers=relief.checkpointed_layers)
    return with_port(dataclasses.replace(plan, run_id=run_id, resume_from=resume_from), port)


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
    event |= {"path": None if restart.checkpoint is None else str(restart.checkpoint)}
    event |= {"relief": to_data(restart.relief)} if restart.relief is not None else {}
    append_json(run.events, event | {"wait_s": restart.wait_s, "why": restart.why})


def summary(attempts: Sequence[Attempt], most: int, why_not: str) -> str:
    """What the verdict says of restarts; empty when there is nothing to say."""
    done = len(attempts) - 1
    times = f"restarted {done} of {most} times" if done else "not restarted" if why_not else ""
    return times + (f"{', not again' if done else ''}: {why_not}" if why_not else "")
