"""What a sweep's metric made of the value that was swept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.reporting.chart import Chart, Row, color, figure, label, line, log_ticks
from launcher.reporting.plots import LOG_FROM
from launcher.running.results import NUMBERS

Job = Mapping[str, Any]  # as in sweep.json


def swept_charts(jobs: Sequence[Job], metric: str) -> list[Chart]:
    """The metric of each job against its value, when a single key was swept and its values are numbers; else none."""
    keys = {key for job in jobs for key in job["differs"]}
    places = [(_value(job), job["numbers"].get(metric), f"job {job['number']}") for job in jobs]
    points = sorted((x, y, name) for x, y, name in places if x is not None and y is not None)
    if len(keys) != 1 or len({x for x, _, _ in points}) < 2:
        return []
    key = keys.pop()
    title = NUMBERS[metric][1] if metric in NUMBERS else f"best {metric}"
    xs, ys, names = map(list, zip(*points, strict=True))
    style: dict[str, Any] = {"mode": "lines+markers", "text": names, "hovertemplate": "%{text}: %{y:,.4~r}"}
    shown = figure([Row(title="", traces=[line(title, xs, ys, color(0), **style)])], label(key), legend=False)
    if xs[0] > 0 and xs[-1] / xs[0] >= LOG_FROM:
        shown["layout"]["xaxis"] |= {"type": "log", **log_ticks(xs)}
    return [Chart(id="swept", title=f"{title} by {key}", figure=shown, wide=True)]


def _value(job: Job) -> float | None:
    """The swept value as a number; None for a word, `null` or several values."""
    try:
        (text,) = job["differs"].values()
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
