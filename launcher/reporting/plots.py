"""Plots of what training wrote: loss, learning rate, evaluations, speed, memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from launcher.reporting import words
from launcher.reporting.chart import (
    NO_STEP,
    RATE,
    STEP,
    Chart,
    Row,
    Switch,
    Trace,
    Value,
    color,
    figure,
    label,
    line,
    log_ticks,
    short,
    smooth,
)
from launcher.reporting.foretold import planned_allocated_gib, planned_reserved_gib
from launcher.reporting.numbers import best_eval, column, lost_losses, own_metric
from launcher.reporting.reality import planned_at_tokens_gib
from launcher.reporting.record import Record, known, number, part_of
from launcher.rundir import COMPLETE
from launcher.running.journal import Line, eval_scores

SPEEDS = (("queries_per_s", "queries/s"), ("tokens_per_s", "tokens/s"))
NEAR = 3  # times beyond the gradient norms that were seen, the limit is still drawn
LOG_FROM = 10  # times from the smallest to the largest value: below, a logarithmic axis shows nothing more


def training_charts(record: Record) -> list[Chart]:
    """All of them, in the order a person wants them."""
    return [
        loss_chart(record),
        rate_chart(record),
        eval_chart(record),
        speed_chart(record),
        memory_chart(record),
    ]


def loss_chart(record: Record) -> Chart:
    """The loss, raw and smoothed, with what happened on the way."""
    about = "Thin: each step. Thick: exponential mean."
    lost = lost_losses(record.steps)
    if lost:
        about += f" The loss was not finite in {words.plural(len(lost), 'step')}, first in step {lost[0]:,}."
    base = Chart(id="loss", title="Loss", about=about, wide=True, why=NO_STEP)
    if not record.steps:
        return base
    xs, ys = [entry["step"] for entry in record.steps], column(record.steps, "loss")
    traces = [
        line("each step", xs, ys, color(5), width=1, opacity=0.75),
        line("smoothed", xs, smooth(ys), color(0), width=2.5),
        *_marks(record, xs, ys),
    ]
    shown = figure([Row(title="loss", traces=traces)], STEP, row_px=330)
    shown["layout"]["hovermode"] = "closest"
    return Chart(id="loss", title="Loss", about=about, figure=shown, switches=_loss_switches(ys), wide=True)


def _loss_switches(ys: Sequence[Value]) -> tuple[Switch, ...]:
    """Linear and logarithmic; none when no loss could be drawn on the latter."""
    positive = [y for y in known(ys) if y > 0]
    if not positive:
        return ()
    linear = {"type": "linear", "tickmode": "auto", "tickformat": ""}
    return tuple(
        Switch(label=name, layout={f"yaxis.{key}": value for key, value in axis.items()})
        for name, axis in (("linear", linear), ("log", {"type": "log", **log_ticks(positive)}))
    )


def _marks(record: Record, xs: Sequence[int], ys: Sequence[Value]) -> list[Trace]:
    """Checkpoints that are still there, resumes, stop requests and warnings, each on the loss curve."""
    best = best_eval(record, own_metric(record))
    kinds = {
        "checkpoint": ("kept checkpoint", "square", color(2)),
        "resumed": ("resumed", "triangle-right", color(3)),
        "stop_requested": ("stop asked for", "x", color(1)),
        "warning": ("warning", "triangle-up", color(4)),
    }
    found = []
    for event, (name, symbol, tint) in kinds.items():
        entries = [entry for entry in record.events if entry.get("event") == event]
        placed = [(_step_of(record, entry), entry) for entry in entries]
        if event == "checkpoint":
            placed = [(step, entry) for step, entry in placed if (record.run.checkpoint(step) / COMPLETE).exists()]
        placed = [(step, entry) for step, entry in placed if step <= xs[-1]]
        texts = [label(_mark_text(entry, step, best)) for step, entry in placed]
        if placed:
            found.append(_points(name, [(step, _near(xs, ys, step)) for step, _ in placed], texts, symbol, tint))
    return found


def _points(name: str, places: Sequence[tuple[int, Value]], texts: Sequence[str], symbol: str, tint: str) -> Trace:
    return {
        **{"type": "scatter", "mode": "markers", "name": name, "text": list(texts)},
        "x": [x for x, _ in places],
        "y": [short(y) for _, y in places],  # as the line's, or they would lie beside it
        "marker": {"symbol": symbol, "size": 9, "color": tint, "line": {"width": 1, "color": "#ffffff"}},
        "hovertemplate": "%{text}",
    }


def _mark_text(entry: Line, step: int, best: Line | None) -> str:
    event = entry.get("event")
    if event == "warning":
        text = str(entry.get("text"))
        return text if len(text) <= 120 else f"{text[:117]}..."
    said = {"checkpoint": "saved step", "resumed": "resumed after step", "stop_requested": "asked to stop at step"}
    text = f"{said[str(event)]} {step:,}"
    return f"{text} (best)" if event == "checkpoint" and best and best["step"] == step else text


def _step_of(record: Record, event: Line) -> int:
    """The step an event belongs to: its own, or the last one before it."""
    if isinstance(event.get("step"), int):
        return int(event["step"])
    before = [entry["step"] for entry in record.steps if entry["time"] <= event["time"]]
    return int(before[-1] if before else record.steps[0]["step"])


def _near(xs: Sequence[int], ys: Sequence[Value], step: int) -> Value:
    """The last loss that is known at `step`, else the first one of all."""
    until = [y for y in ys[: bisect_right(xs, step)] if y is not None]
    return until[-1] if until else next((y for y in ys if y is not None), None)


def rate_chart(record: Record) -> Chart:
    """Learning rate and gradient norm."""
    base = Chart(id="rate", title="Learning rate and gradient norm", why=NO_STEP)
    if not record.steps:
        return base
    xs = [entry["step"] for entry in record.steps]
    rows = [
        Row(
            title="learning rate",
            traces=[line("learning rate", xs, column(record.steps, "lr"), color(0))],
            tick_format="~e",
            from_zero=True,
        )
    ]
    norms, about = column(record.steps, "grad_norm"), ""
    if found := known(norms):
        log = min(found) > 0 and max(found) / min(found) >= LOG_FROM
        title = f"gradient norm before clipping{' (log)' if log else ''}"
        clipped = _clip_line(record, xs, found)
        about = f"Dashed: clipped at {clipped[0]['y'][0]:g}." if clipped else ""
        rows.append(Row(title=title, log=log, traces=[line("gradient norm", xs, norms, color(1)), *clipped]))
    return Chart(id="rate", title=base.title, about=about, figure=figure(rows, STEP, row_px=170, legend=False))


def _clip_line(record: Record, xs: Sequence[int], norms: Sequence[float]) -> list[Trace]:
    """Where gradients are clipped; nothing when that lies far from every norm and would flatten the curve."""
    limit = number(part_of(record.config, "optim").get("max_grad_norm"))
    if not limit or not min(norms) / NEAR <= limit <= NEAR * max(norms):
        return []
    return [line("clipped at", [xs[0], xs[-1]], [limit] * 2, color(7), dash="dash", mode="lines")]


def eval_chart(record: Record) -> Chart:
    """Every evaluation metric over steps, the best one starred."""
    title = "Evaluation metrics"
    if not record.evals:
        return Chart(
            id="eval", title=title, why="No evaluation was made: without dataset.eval there is nothing to score."
        )
    xs = [entry["step"] for entry in record.evals]
    metric = own_metric(record)
    traces = []
    names = dict.fromkeys(name for entry in record.evals for name in eval_scores(entry) if name != "perplexity")
    for index, name in enumerate(names):  # perplexity is the loss on another scale, which would flatten the others
        ys = [number(eval_scores(entry).get(name)) for entry in record.evals]
        width = 2.6 if name == metric else 1.4
        traces.append(line(name, xs, ys, color(index), form=".4f", mode="lines+markers", width=width))
    best = best_eval(record, metric)
    if best:
        value = number(eval_scores(best)[metric])
        text = f"best {metric}: {value:.4f} at step {best['step']:,}"
        traces.append(_points("best", [(best["step"], value)], [label(text)], "star", color(4)))
        traces[-1]["marker"]["size"] = 14
    shown = figure([Row(title="", traces=traces)], STEP, row_px=340)
    return Chart(id="eval", title=title, about="Higher is better, but for loss and perplexity.", figure=shown)


def speed_chart(record: Record) -> Chart:
    """Queries and tokens a second."""
    title, about = "Throughput", "Over all ranks, waiting for data included; evaluations and saves are not."
    if not record.steps:
        return Chart(id="speed", title=title, why=NO_STEP)
    xs = [entry["step"] for entry in record.steps]
    rows = []
    for index, (key, name) in enumerate(SPEEDS):
        ys = column(record.steps, key)
        pale = line(name, xs, ys, color(index), form=RATE, width=1, opacity=0.45)
        thick = line("smoothed", xs, smooth(ys), color(index), form=RATE, width=2.4)
        rows.append(Row(title=name, traces=[pale, thick]))
    return Chart(id="speed", title=title, about=about, figure=figure(rows, STEP, row_px=170, legend=False))


def memory_chart(record: Record) -> Chart:
    """Peak memory of torch's allocator against what the plan expected."""
    title = "GPU memory of training"
    about = (
        "Largest rank. 'Planned' is for a full micro-batch, 'at the tokens seen' for the fullest one there was; "
        "all without what torch does not count, such as the CUDA context."
    )
    allocated = column(record.steps, "memory_gib")
    if not known(allocated):
        why = "No GPU memory was measured" + (
            ": this run trained on a CPU." if record.plan.get("device") == "cpu" else "."
        )
        return Chart(id="memory", title=title, why=why)
    xs = [entry["step"] for entry in record.steps]
    traces = [line("peak allocated", xs, allocated, color(0), form=".2f")]
    reserved = column(record.steps, "memory_reserved_gib")
    if known(reserved):
        traces.append(line("peak reserved", xs, reserved, color(1), form=".2f"))
    levels = (
        ("planned, allocated", planned_allocated_gib(record.plan), 0, "dash"),
        ("planned, reserved", planned_reserved_gib(record.plan), 1, "dash"),
        ("planned, allocated at the tokens seen", planned_at_tokens_gib(record), 0, "dot"),
    )
    for name, planned, tint, style in levels:
        if planned is not None:
            ends = [xs[0], xs[-1]]
            traces.append(line(name, ends, [planned] * 2, color(tint), form=".2f", dash=style, mode="lines"))
    row = Row(title="GiB", traces=traces, from_zero=True)
    shown = figure([row], STEP, row_px=340)
    return Chart(id="memory", title=title, about=about, figure=shown)
