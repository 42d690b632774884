"""Plots of what was foretold beside what came: memory by part, a step's seconds and timeline, other numbers of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.estimates import CONTEXT, FRAGMENTS, LANES
from launcher.planning.describe_memory import MOMENTS
from launcher.reporting import words
from launcher.reporting.chart import COLORS, NO_STEP, PLAIN_NUMBERS, Chart, Row, Trace, color, figure, label, short
from launcher.reporting.foretold import BYTES_A_GIB, planned_parts
from launcher.reporting.numbers import PARTS, column, rank_peaks, steady_steps
from launcher.reporting.reality import driver_peaks, mean_step_s, planned_time, world_size
from launcher.reporting.record import Record, known, number, part_of
from launcher.reporting.timing import PART_NAMES
from launcher.running.journal import Line

SHOWN_RANKS = 16
LEGEND_ROW_PX, LEGEND_COLUMNS = 19, 5
PATTERNS = ("", "/", ".", "x")  # of the bars of parts, when there are more of them than colours
PLANNED, SEEN = "planned", "seen"
NO_TIME = "The plan foretells no time: it is for a CPU, or older than that."
NO_SCALING = "The plan weighs no other numbers of GPUs: it is for a CPU, or older than that."


def foresight_charts(record: Record) -> list[Chart]:
    """All of them."""
    return [memory_bars(record), step_bars(record), step_timeline(record), scaling_chart(record)]


def memory_bars(record: Record) -> Chart:
    """The planned parts of one GPU stacked, above what each rank took and each GPU's driver saw."""
    title = "Memory of each GPU, planned and seen"
    parts = {name: size for name, size in planned_parts(record.plan).items() if size}
    seen = _seen_memory(record)
    if not seen:
        return Chart(id="memory_parts", title=title, why="No GPU memory was measured.")
    order = sorted(parts, key=lambda name: (name == CONTEXT) + (name in (CONTEXT, FRAGMENTS)))  # as torch counts them
    bars = [_part_bar(name, {PLANNED: parts[name]}, place) for place, name in enumerate(order)]
    for name, shade in (("allocated", 0.9), ("held by torch beside it", 0.5), ("in use, as the driver says", 0.7)):
        values = {where: found[name] for where, found in seen.items() if name in found}
        if values:
            bars.append(_part_bar(name, values, 7, opacity=shade))
    shown = _lying_bars([PLANNED, *seen] if parts else list(seen), bars, "GiB")
    shown["layout"]["shapes"] = _capacity(record)
    moment = str(record.plan.get("memory_moment") or "")
    fullest = f" The plan's fullest moment is {MOMENTS.get(moment, moment)}." if moment else ""
    about = f"Peaks of the whole run. Lines: all that a GPU has, and what the plan leaves free.{fullest}"
    return Chart(id="memory_parts", title=title, about=about, figure=shown, wide=True)


def _seen_memory(record: Record) -> dict[str, dict[str, float]]:
    """Bar -> its segments, GiB: of the fullest ranks, then of the GPUs that the driver looked at."""
    allocated, reserved = (rank_peaks(record.steps, key) for key in ("memory_gib", "memory_reserved_gib"))
    fullest = sorted(sorted(allocated, key=lambda rank: -allocated[rank])[:SHOWN_RANKS])
    found: dict[str, dict[str, float]] = {}
    for rank in fullest:
        found[f"rank {rank}"] = {"allocated": allocated[rank]}
        if rank in reserved:
            found[f"rank {rank}"]["held by torch beside it"] = max(0.0, reserved[rank] - allocated[rank])
    for name, peak in list(driver_peaks(record).items())[:SHOWN_RANKS] if found else ():
        found[name] = {"in use, as the driver says": peak}
    return found


def _capacity(record: Record) -> list[dict[str, Any]]:
    """Upright lines at the end of a GPU's memory and of what a plan uses of it."""
    capacity = number(record.plan.get("memory_capacity"))
    if not capacity:
        return []
    headroom = number(part_of(record.config, "memory").get("headroom")) or 0.0
    return [
        {
            **{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at},
            "line": {"color": color(1), "width": 2, "dash": style},
        }
        for at, style in (
            (short(capacity / BYTES_A_GIB), "solid"),
            (short((1 - headroom) * capacity / BYTES_A_GIB), "dot"),
        )
    ]


def step_bars(record: Record) -> Chart:
    """Seconds of a step by part, planned and seen."""
    title = "Seconds of a step, planned and seen"
    planned = planned_time(record)
    if planned is None:
        return Chart(id="step_parts", title=title, why=NO_TIME)
    if not record.steps:
        return Chart(id="step_parts", title=title, why=NO_STEP)
    parts = {name: {PLANNED: value} for name, value in planned[1].items() if value > 0}
    seen = _seen_parts(record)
    for name, value in seen.items():
        parts.setdefault(name, {})[SEEN] = value
    unit, scale = words.time_unit(max(planned[0], sum(seen.values())))
    bars = [
        _part_bar(name, {where: scale * value for where, value in values.items()}, place)
        for place, (name, values) in enumerate(parts.items())
    ]
    bound = part_of(record.plan, "time").get("bound")
    about = f"Means over steps and ranks, without the first steps after a start. Planned to wait most for: {bound}."
    return Chart(id="step_parts", title=title, about=about, figure=_lying_bars([PLANNED, SEEN], bars, unit), wide=True)


def _seen_parts(record: Record) -> dict[str, float]:
    """Mean seconds of the parts of a step, and what none of them covers; empty before the first step."""
    steady, mean = steady_steps(record), mean_step_s(record)
    found = {}
    for key in PARTS:
        values = known(column(steady, key))
        if values:
            found[PART_NAMES[key]] = sum(values) / len(values)
    if mean is not None:
        found["rest"] = max(0.0, mean - sum(found.values()))
    return found


def step_timeline(record: Record) -> Chart:
    """What runs when in one micro-step and the optimizer, as planned."""
    title = "One micro-step and the optimizer, as planned"
    spans = [span for span in _entries(part_of(record.plan, "time"), "timeline") if _is_span(span)]
    if not spans:
        return Chart(id="timeline", title=title, why=NO_TIME)
    begin = min(span["begin_s"] for span in spans)
    unit, scale = words.time_unit(max(span["end_s"] for span in spans) - begin)
    lanes = [name for name in LANES if any(span.get("lane") == name for span in spans)]
    lanes += [name for name in dict.fromkeys(str(span.get("lane")) for span in spans) if name not in lanes]
    bars = []
    for place, name in enumerate(dict.fromkeys(str(span.get("name")) for span in spans)):
        own = [span for span in spans if span.get("name") == name]
        lasting = [scale * (span["end_s"] - span["begin_s"]) for span in own]
        bar = _bar(name, [str(span.get("lane")) for span in own], lasting, place)
        bar |= {"base": [short(scale * (span["begin_s"] - begin)) for span in own], "insidetextanchor": "middle"}
        bars.append(bar | {"text": [label(name)] * len(own), "textposition": "inside", "textangle": 0})
    shown = _lying_bars(lanes, bars, unit)
    shown["layout"] |= {"barmode": "overlay", "uniformtext": {"minsize": 9, "mode": "hide"}}
    about = "What lies on top of each other happens at the same time: its time is hidden but for what goes on alone."
    return Chart(id="timeline", title=title, about=about, figure=shown, wide=True)


def _is_span(span: Line) -> bool:
    return all(number(span.get(key)) is not None for key in ("begin_s", "end_s"))


def scaling_chart(record: Record) -> Chart:
    """Hours and GPU-hours of an epoch against the number of GPUs; this run's own as it went."""
    title = "The same run on other numbers of GPUs"
    scales = [scale for scale in _entries(record.plan, "scaling") if number(scale.get("gpus"))]
    fit = [scale for scale in scales if scale.get("fits") and number(scale.get("epoch_hours")) is not None]
    if not fit:
        why = "Rows were not counted when it was planned." if any(s.get("fits") for s in scales) else NO_SCALING
        return Chart(id="scaling", title=title, why=why)
    xs = [f"{scale['gpus']}" for scale in scales]
    seen = _epoch_hours(record)
    rows = []
    for tint, (key, name) in enumerate((("epoch_hours", "hours an epoch"), ("epoch_gpu_hours", "GPU-hours an epoch"))):
        values = {f"{scale['gpus']}": number(scale.get(key)) for scale in fit}
        bars: Trace = {
            **{"type": "bar", "name": name, "x": xs, "y": [short(values.get(x)) for x in xs], "width": 0.6},
            **{"marker": {"color": color(tint)}, "hovertemplate": "%{y:.3~r}"},
        }
        traces = [bars]
        if seen is not None:
            here = seen * (world_size(record) if key == "epoch_gpu_hours" else 1)
            traces.append(_seen_point(f"{world_size(record)}", here))
        rows.append(Row(title=name, traces=traces, from_zero=True))
    shown = figure(rows, "GPUs", row_px=170, legend=False)
    shown["layout"]["xaxis"] = {**shown["layout"]["xaxis"], "type": "category", "categoryarray": xs}
    without = [f"{scale['gpus']}" for scale in scales if not scale.get("fits")]
    about = f"As planned, with the setting that suits each. {'Star: as this run went. ' if seen is not None else ''}"
    about += f"Does not fit on {', '.join(without)}." if without else ""
    return Chart(id="scaling", title=title, about=about.strip(), figure=shown)


def _seen_point(x: str, y: float) -> Trace:
    return {
        **{"type": "scatter", "mode": "markers", "name": SEEN, "x": [x], "y": [short(y)]},
        "marker": {"symbol": "star", "size": 13, "color": color(4), "line": {"width": 1, "color": "#ffffff"}},
        "hovertemplate": "%{y:.3~r}",
    }


def _epoch_hours(record: Record) -> float | None:
    """Hours that an epoch of this run took by its mean step; evaluations and saves do not count."""
    steps, mean = number(part_of(record.plan, "batch").get("steps_per_epoch")), mean_step_s(record)
    return None if steps is None or mean is None else steps * mean / 3600


def _entries(line: Line, key: str) -> list[Line]:
    found = line.get(key)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _part_bar(name: str, values: Mapping[str, float], place: int, **options: Any) -> Trace:
    return {**_bar(name, list(values), list(values.values()), place), **options}


def _bar(name: str, places: Sequence[str], values: Sequence[float], place: int) -> Trace:
    """Segments of lying bars in the colour of the n-th thing."""
    shape = PATTERNS[place // len(COLORS) % len(PATTERNS)]
    pattern = {"shape": shape, "size": 6, "fillmode": "overlay", "fgcolor": "#ffffff"}
    return {
        **{"type": "bar", "orientation": "h", "name": label(name), "y": [label(where) for where in places]},
        "x": [short(value) for value in values],
        "marker": {"color": color(place), "pattern": pattern},
        "hovertemplate": f"{label(name)}: %{{x:.3~r}}<extra></extra>",
    }


def _lying_bars(places: Sequence[str], bars: Sequence[Trace], unit: str) -> dict[str, Any]:
    """Bars from left to right, the first place on top."""
    shown = figure([Row(title=unit, traces=bars)], "", row_px=34 * len(places))
    shown["layout"] |= {"hovermode": "closest", "barmode": "stack"}
    shown["layout"]["legend"] |= {"traceorder": "normal", "y": -30 / (34 * len(places))}
    shown["layout"]["height"] += LEGEND_ROW_PX * ((len(bars) - 1) // LEGEND_COLUMNS)
    axis = {"type": "category", "automargin": True, "ticksuffix": " ", "autorange": "reversed"}
    shown["layout"]["yaxis"] = {**axis, "categoryorder": "array", "categoryarray": [label(name) for name in places]}
    shown["layout"]["xaxis"] |= {**PLAIN_NUMBERS, "rangemode": "tozero"}
    return shown
