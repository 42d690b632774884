"""Pieces of a plot: lines, rows over one x axis, and what is said beside them; plain data for plotly.js."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_POINTS = 2000  # of a line: a screen is not wider, and the page stays small
ROW_POINTS = 8000  # of all lines over each other
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c8c8c")  # told apart by all
STEP = "step"
RATE = ",.4~r"  # d3: four digits that count, never an exponent
NO_STEP = "No step has been written down yet."
# Plain numbers with thousands apart, powers of ten for what is very small or large; never k, m, µ or M.
PLAIN_NUMBERS = {"tickformat": "", "exponentformat": "power", "minexponent": 6, "separatethousands": True}
FEW = 5  # up to so many whole numbers plotly would also label halves
DASHES = ("solid", "dash", "dot", "dashdot")

Trace = dict[str, Any]
Value = float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One y axis over the common x axis."""

    title: str
    traces: Sequence[Trace]
    log: bool = False
    y_range: tuple[float, float] | None = None
    tick_format: str = ""  # d3's; empty is PLAIN_NUMBERS
    counts: bool = False  # whole numbers only
    from_zero: bool = False
    weight: float = 1.0  # height beside the other rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A button of a plot: which traces it shows, and what it changes in the layout."""

    label: str
    layout: dict[str, Any] = field(default_factory=dict)
    visible: Sequence[Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One plot with its words; without a figure, `why` says what is missing."""

    id: str
    title: str
    about: str = ""
    figure: dict[str, Any] | None = None
    switches: Sequence[Switch] = ()
    why: str = ""
    wide: bool = False

    @property
    def thinned(self) -> tuple[int, int] | None:
        """Points of the longest line that is not drawn with all of them, and how many are drawn."""
        traces = (self.figure or {}).get("data", [])
        found = [(trace["meta"]["points"], len(trace["x"])) for trace in traces if "meta" in trace]
        return max(found, default=None)


def thin(xs: Sequence[float], ys: Sequence[Value], limit: int = MAX_POINTS) -> tuple[list[float], list[Value]]:
    """At most `limit` points: the first, the last, and the lowest and highest of each stretch between.

    A gap (None) in a stretch stays a gap when the whole stretch is one.
    """
    if len(xs) <= limit:
        return list(xs), list(ys)
    inner = range(1, len(xs) - 1)
    stretches = (limit - 2) // 2
    kept = {0, len(xs) - 1}
    for number in range(stretches):
        stretch = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        there = [index for index in stretch if ys[index] is not None]
        if there:
            kept |= {min(there, key=lambda i: ys[i] or 0.0), max(there, key=lambda i: ys[i] or 0.0)}
        else:
            kept.add(stretch[0])
    order = sorted(kept)
    return [xs[i] for i in order], [ys[i] for i in order]


def smooth(ys: Sequence[Value]) -> list[Value]:
    """Exponential mean without a start at zero; its reach grows with the run, and gaps are passed over."""
    keep = 1 - 2 / (max(5, min(200, len(ys) // 25)) + 1)
    total = weight = 0.0
    found: list[Value] = []
    for y in ys:
        if y is not None:
            total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        found.append(total / weight if weight and y is not None else None)
    return found


def line(
    name: str,
    xs: Sequence[float],
    ys: Sequence[Value],
    color: str,
    *,
    form: str = ",.4~g",
    beside: int = 1,
    **options: Any,
) -> Trace:
    """A line trace, thinned, more so when many lines stand `beside` it.

    `options` are plotly's, and those of `line` may be given as `width` and `dash`.
    """
    shown_x, shown_y = thin(xs, ys, max(100, min(MAX_POINTS, ROW_POINTS // max(1, beside))))
    style = {"color": color, "width": options.pop("width", 1.8), "dash": options.pop("dash", "solid")}
    trace = {
        "type": "scatter",
        "mode": "lines" if len(xs) > 1 else "markers",
        "name": label(name),
        "x": [short(x) for x in shown_x],
        "y": [short(y) for y in shown_y],
        "line": style,
        "hovertemplate": f"%{{y:{form}}}",
        **options,
    }
    if len(shown_x) < len(xs):
        trace["meta"] = {"points": len(xs)}
    return trace


def figure(rows: Sequence[Row], x_title: str, *, row_px: int = 190, legend: bool = True) -> dict[str, Any]:
    """Rows from top to bottom over one x axis."""
    height = 110 + row_px * sum(row.weight for row in rows)
    gap = 44 / (height - 110) if len(rows) > 1 else 0.0
    room = (1 - gap * (len(rows) - 1)) / sum(row.weight for row in rows)
    layout: dict[str, Any] = {
        "height": round(height),
        "showlegend": legend,
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "annotations": [],
        # Below the x axis' title, where it covers neither headings nor lines, however many names it has.
        "legend": {"y": -56 / (height - 110), "yanchor": "top"},
        "xaxis": {**PLAIN_NUMBERS, "title": {"text": x_title}, "anchor": f"y{len(rows)}" if len(rows) > 1 else "y"},
    }
    if x_title == STEP:
        shown = [trace for row in rows for trace in row.traces if trace.get("visible", True)]
        layout["xaxis"] |= whole_ticks([x for trace in shown for x in trace["x"]])
    data: list[Trace] = []
    top = 1.0
    for number, row in enumerate(rows, start=1):
        name = "" if number == 1 else str(number)
        bottom = max(0.0, top - room * row.weight)
        axis: dict[str, Any] = {"domain": [bottom, top], "anchor": "x", **PLAIN_NUMBERS, "tickformat": row.tick_format}
        values = [y for trace in row.traces for y in trace.get("y", ()) if isinstance(y, int | float)]
        if row.log:
            axis |= {"type": "log", **log_ticks(values)}
        if row.counts:
            axis |= whole_ticks([0, *values])
        if row.y_range:
            axis["range"] = list(row.y_range)
        if row.from_zero:
            axis["rangemode"] = "tozero"
        layout[f"yaxis{name}"] = axis
        layout["annotations"].append(_heading(row.title, top))
        data += [{**trace, "yaxis": f"y{name}"} for trace in row.traces]
        top = bottom - gap
    return {"data": data, "layout": layout}


def whole_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Axis settings without labels between whole numbers."""
    return {"dtick": 1} if values and max(values) - min(values) <= FEW else {}


def log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Axis settings for a logarithmic axis over positive values: whole numbers, where plotly would label bare digits.

    Example:
        >>> log_ticks([0.3, 40])["tickvals"]
        [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
    """
    low, high = math.floor(math.log10(min(values))), math.floor(math.log10(max(values)))
    digits = (1, 2, 5) if high - low < 3 else (1,)
    powers = range(low, high + 2 if len(digits) == 1 else high + 1, max(1, (high - low) // 6))
    return {"tickmode": "array", "tickvals": [float(f"{d}e{p}") for p in powers for d in digits], "tickformat": "~g"}


def _heading(text: str, top: float) -> dict[str, Any]:
    return {
        **{"text": label(text), "xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left"},
        **{"yanchor": "bottom", "showarrow": False, "font": {"size": 12}},
    }


def color(number: int) -> str:
    """The colour of the n-th thing."""
    return COLORS[number % len(COLORS)]


def dash(number: int) -> str:
    """The line of the n-th thing, when there are more of them than colours."""
    return DASHES[number // len(COLORS) % len(DASHES)]


def label(text: str) -> str:
    """Text for plotly, which reads a little HTML in names and labels."""
    return html.escape(text, quote=False)


def short(value: Value) -> Value:
    """The value as a line is drawn with: six digits are more than a screen has."""
    return None if value is None else float(f"{value:.6g}") if value != int(value) else int(value)
