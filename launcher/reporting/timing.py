"""Plots of time: where a step's goes, how it varies, over ranks, and over the phases of the whole run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from launcher.reporting import words
from launcher.reporting.chart import NO_STEP, STEP, Chart, Row, Trace, color, figure, label, line
from launcher.reporting.numbers import PARTS, column, quantile, steady_steps
from launcher.reporting.record import Record, known, number, numbers, part_of
from launcher.running.journal import Line

BINS = 40
PERCENT = "%{y:.3~g} %"
AREA_POINTS = 400
UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
PART_NAMES = {
    "data_wait_s": "waiting for data",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
}


def timing_charts(record: Record) -> list[Chart]:
    """All of them."""
    return [shares_chart(record), spread_chart(record), ranks_chart(record), phase_chart(record)]


def shares_chart(record: Record) -> Chart:
    """Where the time of a step goes, as shares of the whole."""
    title = "Where a step's time goes"
    about = "Waiting is that of the slowest rank, the rest are means over ranks; 'rest' is what none of them covers."
    lines = [entry for entry in record.steps if all(number(entry.get(key)) is not None for key in (*PARTS, "step_s"))]
    if not lines:
        return Chart(
            id="shares",
            title=title,
            why="Its steps were written without their parts." if record.steps else NO_STEP,
        )
    size = -(-len(lines) // AREA_POINTS)
    groups = [lines[i : i + size] for i in range(0, len(lines), size)]
    if size > 1:
        about += f" Each point is the mean of {size} steps."
    xs = [group[-1]["step"] for group in groups]
    shares = [step_shares(group) for group in groups]
    areas = [
        line(name, xs, [100 * share[name] for share in shares], color(index), stackgroup="one", width=0.5)
        for index, name in enumerate(shares[0])
    ]
    for area, tint in zip(areas, (1, 0, 5, 2, 7), strict=True):
        area["line"]["color"] = color(tint)
        area |= {"fillcolor": color(tint), "hovertemplate": PERCENT}
    waits = [100 * share[PART_NAMES["data_wait_s"]] for share in shares]
    waiting = line("waiting", xs, waits, color(1), showlegend=False, hovertemplate=PERCENT)
    rows = [
        Row(title="share of a step, %", traces=areas, y_range=(0, 100), weight=1.5),
        Row(title="share of waiting for data, %", traces=[waiting], from_zero=True, weight=0.8),
    ]
    shown = figure(rows, STEP, row_px=160)
    return Chart(id="shares", title=title, about=about, figure=shown)


def step_shares(lines: Sequence[Line]) -> dict[str, float]:
    """Share of each part in the time of these steps; together they are 1."""
    seconds = {PART_NAMES[key]: sum(known(column(lines, key))) for key in PARTS}
    whole = max(sum(known(column(lines, "step_s"))), sum(seconds.values())) or 1.0
    shares = {name: value / whole for name, value in seconds.items()}
    return {**shares, "rest": max(0.0, 1.0 - sum(shares.values()))}


def spread_chart(record: Record) -> Chart:
    """How much the time of a step varies."""
    title = "Step time, its spread"
    times = known(column(steady_steps(record), "step_s"))
    if len(times) < 2:
        return Chart(id="spread", title=title, why="Fewer than two steps were timed.")
    low, high = min(times), quantile(times, 0.99) or max(times)
    width = (high - low) / BINS or max(high, 1e-3) / BINS
    counts = [0] * BINS
    beyond = [value for value in times if value > low + BINS * width]
    for value in times:
        if value <= low + BINS * width:
            counts[min(BINS - 1, int((value - low) / width))] += 1
    about = f"Median {words.seconds(statistics.median(times))}; without the first steps after a start."
    if beyond:
        about += f" Not drawn: {words.plural(len(beyond), 'step')} of up to {words.seconds(max(beyond))}."
    unit, scale = words.time_unit(high)
    bars: Trace = {
        "type": "bar",
        "x": [float(f"{scale * (low + (index + 0.5) * width):.6g}") for index in range(BINS)],
        "y": counts,
        "width": scale * width,
        "marker": {"color": color(0)},
        "name": "steps",
        "hovertemplate": f"%{{y}} steps of about %{{x:.3~r}} {unit}<extra></extra>",
    }
    shown = figure(
        [Row(title="steps", traces=[bars], counts=True)], f"time of a step, {unit}", row_px=300, legend=False
    )
    shown["layout"] |= {"hovermode": "closest", "bargap": 0.02}
    return Chart(id="spread", title=title, about=about, figure=shown)


def ranks_chart(record: Record) -> Chart:
    """Forward, backward and waiting time of each rank: who keeps the others waiting."""
    title = "Step time by rank"
    about = "Boxes hold half of the steps, whiskers 90 %. In the backward pass ranks wait for the slowest."
    lines = [entry for entry in steady_steps(record) if part_of(entry, "ranks")]
    if not lines:
        return Chart(
            id="ranks",
            title=title,
            why=f"{NO_STEP if not record.steps else 'Its steps were written without their ranks.'}",
        )
    rows = []
    for index, (key, name) in enumerate(
        (("forward_s", "forward"), ("backward_s", "backward"), ("data_wait_s", "waiting for data"))
    ):
        columns = by_rank(lines, key)
        if columns:
            unit, boxes = _boxes(name, columns, color((0, 5, 1)[index]))
            rows.append(Row(title=f"{name}, {unit}", traces=[boxes]))
    shown = figure(rows, "rank", row_px=130, legend=False)
    shown["layout"] |= {"hovermode": "closest"}
    shown["layout"]["xaxis"] |= {"dtick": 1 if len(by_rank(lines, "forward_s")) <= 16 else None}
    return Chart(id="ranks", title=title, about=about, figure=shown)


def by_rank(lines: Sequence[Line], key: str) -> dict[int, list[float]]:
    """The values of each rank over steps."""
    found: dict[int, list[float]] = {}
    for entry in lines:
        for rank, value in enumerate(numbers(part_of(entry, "ranks").get(key))):
            if value is not None:
                found.setdefault(rank, []).append(value)
    return dict(sorted(found.items()))


def _boxes(name: str, columns: dict[int, list[float]], tint: str) -> tuple[str, Trace]:
    """The unit of time that suits them, and a box for each rank."""
    shares = {"lowerfence": 0.05, "q1": 0.25, "median": 0.5, "q3": 0.75, "upperfence": 0.95}
    cuts = {key: known(quantile(values, share) for values in columns.values()) for key, share in shares.items()}
    unit, scale = words.time_unit(max(cuts["upperfence"]))
    return unit, {
        **{"type": "box", "name": name, "x": list(columns), "marker": {"color": tint}, "line": {"width": 1.4}},
        **{key: [float(f"{scale * value:.4g}") for value in values] for key, values in cuts.items()},
    }


def phase_seconds(record: Record) -> dict[str, float]:
    """Seconds of each phase of rank 0, in the order they came; empty when not every change was written down."""
    found: dict[str, float] = {}
    for name, begin, end in _phase_spans(record):
        found[name] = found.get(name, 0.0) + end - begin
    if set(found) == {"starting"} or (record.steps and "training" not in found):
        return {}
    return found


def _phase_spans(record: Record) -> Iterator[tuple[str, float, float]]:
    changes = [entry for entry in record.events if entry.get("event") == "phase"]
    for number_, part in enumerate(record.parts):
        following = record.parts[number_ + 1].start if number_ + 1 < len(record.parts) else float("inf")
        inside = [entry for entry in changes if part.start <= entry["time"] < following]
        names = ["starting", *(str(entry.get("phase")) for entry in inside)]
        times = [part.start, *(min(entry["time"], part.end) for entry in inside), part.end]
        for name, begin, end in zip(names, times, times[1:], strict=False):
            if end > begin:
                yield ("ending" if name == "ended" else name), begin, end


def phase_chart(record: Record) -> Chart:
    """Time per phase of the whole run."""
    title = "Time per phase"
    found = phase_seconds(record)
    if not found:
        why = "Not every change of phase was written down." if record.steps else "No phase was written down yet."
        return Chart(id="phases", title=title, why=why)
    names = list(found)[::-1]
    whole = sum(found.values()) or 1.0
    texts = [f"{words.duration(found[name])}, {words.percent(found[name] / whole)}" for name in names]
    longest = max(found.values())
    unit, seconds = next(entry for entry in UNITS if longest >= 3 * entry[1] or entry[1] == 1)
    bars: Trace = {
        **{"type": "bar", "orientation": "h", "y": [label(name) for name in names], "marker": {"color": color(0)}},
        "x": [round(found[name] / seconds, 3) for name in names],
        **{"text": texts, "textposition": "auto", "cliponaxis": False, "hovertemplate": "%{y}: %{text}<extra></extra>"},
    }
    shown = figure([Row(title="", traces=[bars])], unit, row_px=40 + 34 * len(names), legend=False)
    shown["layout"] |= {"hovermode": "closest", "annotations": []}
    shown["layout"]["yaxis"] = {"type": "category", "automargin": True, "ticksuffix": " "}
    return Chart(id="phases", title=title, about="Of rank 0, from start to end.", figure=shown)
