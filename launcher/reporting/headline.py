"""The top of a run's page: what ran, how it ended, and the numbers that matter."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from launcher.families import PARTS
from launcher.reporting import words
from launcher.reporting.foretold import foretold_line
from launcher.reporting.numbers import WARM_STEPS, Summary
from launcher.reporting.reality import world_size
from launcher.reporting.record import Record, number, part_of
from launcher.running.journal import Line

GOOD, BAD, OTHER = "good", "bad", "other"
TONES = {"done": GOOD, "failed": BAD, "lost": BAD, "interrupted": BAD}
SHOWN_FAILURES = 8
TRACEBACK_LINES = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One key number."""

    name: str
    value: str
    hint: str = ""


def tone(record: Record) -> str:
    """Whether the state is good news."""
    return TONES.get(record.state, OTHER)


def facts(record: Record) -> list[tuple[str, str]]:
    """What ran and where, as (name, value)."""
    plan, config = record.plan, record.config
    start = datetime.fromtimestamp(record.parts[0].start, timezone.utc)
    parts = len(record.parts)
    took = words.duration(record.seconds) + (f" in {parts} parts (resumed)" if parts > 1 else "")
    data, zero = part_of(config, "dataset"), part_of(plan, "deepspeed", "zero_optimization").get("stage")
    found = [
        ("state", record.text),
        ("started", f"{start:%Y-%m-%d %H:%M} UTC, took {took}{' so far' if record.goes_on else ''}"),
        ("model", _model(record)),
        ("trained", trained(record)),
        ("on", _where(record)),
        ("data", ", ".join([f"{data.get('name', words.NONE)}", *_rows(record)])),
        (
            "how",
            f"ZeRO stage {zero}, {plan.get('precision')}, attention {plan.get('attention')}, "
            f"loss {part_of(config, 'loss').get('name')}, lr {words.plain(number(plan.get('lr')), 'g')}, "
            f"{_length(record)}",
        ),
    ]
    return [(name, value) for name, value in found if value]


def _length(record: Record) -> str:
    """Batch, how long it was asked to train, and its seed."""
    train = part_of(record.config, "train")
    steps, epochs = number(train.get("max_steps")), number(train.get("epochs"))
    asked = f"{words.count(steps)} steps" if steps else f"epochs {words.plain(epochs, 'g')}"
    queries = words.count(number(part_of(record.plan, "batch").get("global_size")))
    return f"{queries} queries a step, {asked}, seed {words.plain(number(train.get('seed')), '.0f')}"


def _rows(record: Record) -> list[str]:
    batch = part_of(record.plan, "batch")
    counts = ((number(batch.get("train_rows")), "rows to train on"), (number(batch.get("eval_rows")), "rows held out"))
    return [f"{words.count(value)} {what}" for value, what in counts if value is not None]


def _model(record: Record) -> str:
    model = part_of(record.config, "model")
    total = sum(number(count) or 0 for count in part_of(record.plan, "parameters").values())
    source = model.get("path") or model.get("repo")
    weights = "random weights" if model.get("weights") == "random" else "pretrained"
    return (
        f"{model.get('name', words.NONE)}{f' ({source})' if source else ''}, {_parameters(total)} parameters, {weights}"
    )


def trained(record: Record) -> str:
    """Which parts train, how, and what share that is."""
    tune, trainable = part_of(record.config, "tune"), part_of(record.plan, "trainable")
    parts = []
    for part in PARTS:
        how = str(tune.get("language" if part == "embeddings" else part))
        if number(trainable.get(part)):
            parts.append(f"{part} (lora r={tune.get('r')})" if how == "lora" else f"{part} (in full)")
    counts = [sum(number(v) or 0 for v in part_of(record.plan, key).values()) for key in ("trainable", "parameters")]
    share = (
        f"{_parameters(counts[0])} parameters, {words.plain(100 * counts[0] / counts[1], '.3g')} %" if counts[1] else ""
    )
    return f"{', '.join(parts)}: {share}" if parts else ""


def _parameters(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def _where(record: Record) -> str:
    hosts = record.plan.get("hosts")
    names = [str(host.get("name")) for host in hosts if isinstance(host, dict)] if isinstance(hosts, list) else []
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    world = world_size(record)
    if record.plan.get("device") == "cuda":
        return f"{words.plural(world, 'GPU')} ({record.plan.get('gpu_kind') or 'kind not known'}) on {shown}"
    return f"{words.plural(world, 'CPU rank')} on {shown}"


def tiles(record: Record, summary: Summary) -> list[Tile]:
    """Key numbers of a run."""
    s = summary
    steady = f"without the first {WARM_STEPS} steps after a start"
    best_hint = (
        f"step {s.best_step:,}; before training {words.plain(s.before, '.4f')}" if s.best_step is not None else ""
    )
    of = "" if s.total_steps is None else f"of {s.total_steps:,}"
    if any(event.get("event") == "early_stop" and event.get("step") == s.steps for event in record.events):
        of += ", stopped early: no new best (eval.patience)"
    spread = (
        f"80 % of steps: {words.seconds(s.step_low_s)} to {words.seconds(s.step_high_s)}"
        if s.step_s is not None
        else ""
    )
    found = [
        Tile(name=f"best {s.metric}", value=words.plain(s.best, ".4f"), hint=best_hint or "no evaluation"),
        Tile(name=f"{s.metric} at the end", value=words.plain(s.after, ".4f"), hint="last evaluation"),
        Tile(
            name="loss, last tenth",
            value=words.loss(s.final_loss),
            hint="mean of the last tenth of the steps, at most 50",
        ),
        Tile(name="steps", value=f"{s.steps:,}", hint=of),
        Tile(name="queries/s", value=words.count(s.queries_per_s), hint=steady),
        Tile(name="tokens/s", value=words.count(s.tokens_per_s), hint=steady),
        Tile(name="step time", value=words.seconds(s.step_s), hint=f"median; {spread}" if spread else ""),
        Tile(name="waiting for data", value=words.percent(s.data_wait), hint="share of the steps' time, slowest rank"),
        Tile(name="peak GPU memory", value=words.gib(s.peak_gib), hint="allocated by torch, largest rank"),
        Tile(name="host memory", value=words.gib(s.host_gib), hint="most in use on a host, by everything on it"),
        Tile(name="GPU use", value=words.percent(s.gpu_util), hint="mean of the monitor's looks while it trained"),
    ]
    shown = ("best", "peak", "GPU") if record.plan.get("device") == "cuda" else ("best",)  # even when not known
    return [tile for tile in found if tile.value != words.NONE or tile.name.startswith(shown)]


def failures(record: Record) -> dict[str, Any] | None:
    """The first failure with its details, and the headlines of the others; None when nothing failed."""
    first = (record.outcome or {}).get("first_failure")
    if not isinstance(first, dict):
        return None
    others = (record.outcome or {}).get("failures")
    later = [str(other.get("text")) for other in others[1:]] if isinstance(others, list) else []
    return {
        "text": str(first.get("text")),
        "details": _details(first),
        "log": str(first.get("log", "")),
        "later": later[:SHOWN_FAILURES],
        "more": max(0, len(later) - SHOWN_FAILURES),
    }


def _details(first: Line) -> str:
    error = part_of(first, "error")
    text = str(error.get("traceback") or error.get("message") or "")
    return "\n".join(text.rstrip().splitlines()[-TRACEBACK_LINES:])


def summary_lines(record: Record, summary: Summary) -> list[str]:
    """The run in a few lines for a terminal."""
    s = summary
    lines = [f"{record.name}: {record.text}, {words.duration(record.seconds)}{' so far' if record.goes_on else ''}"]
    lines.append(f"  {_model(record)}; {_where(record)}")
    if failed := failures(record):
        lines.append(f"  {failed['text']}")
    if s.steps:
        of = "" if s.total_steps is None else f" of {s.total_steps:,}"
        lines.append(f"  {s.steps:,}{of} steps, loss {words.loss(s.final_loss)} (mean of the last tenth)")
    if s.best is not None:
        before = "" if s.before is None else f", before training {s.before:.4f}"
        lines.append(f"  best {s.metric} {s.best:.4f} at step {s.best_step:,}{before}")
    if s.queries_per_s is not None:
        speed = f"  {words.count(s.queries_per_s)} queries/s, {words.count(s.tokens_per_s)} tokens/s"
        lines.append(f"{speed}, step {words.seconds(s.step_s)}, waiting for data {words.percent(s.data_wait)}")
    if s.peak_gib is not None:
        lines.append(f"  peak memory {words.gib(s.peak_gib)} a GPU, GPU use {words.percent(s.gpu_util)}")
    if found := foretold_line(record.plan, record.steps):
        lines.append(f"  {found}")
    return lines
