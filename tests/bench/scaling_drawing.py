"""Small plots of efficiency against the number of GPUs, one a work, as one SVG file in the style of peer_drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

from tests.bench.peer_drawing import WIDTH, opened, text

Points = Mapping[int, float]  # GPUs -> share of the rate of the fewest

COLUMNS, LEFT, TOP = 4, 20, 96  # of the first panel
EACH_X, EACH_Y = (WIDTH - LEFT) / COLUMNS, 172
INSET, PLOT_X, PLOT_Y = 42, 114, 96  # of a panel: room for numbers, and what its lines lie in
LOWEST, HIGHEST, SAID = 0.6, 1.1, 0.68  # shares at the bottom, at the top, and where the last one is written
LINES = """
.grid { stroke: #d5dae0 } .told { stroke: #8a95a0; stroke-dasharray: 4 4; fill: none; stroke-width: 1.5 }
.seen { stroke: #17698c; fill: none; stroke-width: 2.5 } .dot { fill: #17698c } .goal { stroke: #b4552d }
.small { font-size: 11px }
@media (prefers-color-scheme: dark) {
.grid { stroke: #343c45 } .told { stroke: #7d8894 } .seen { stroke: #56b4d6 } .dot { fill: #56b4d6 }
.goal { stroke: #e08a5f }
}
"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One work."""

    name: str
    seen: Points
    told: Points
    goal: float


def drawn(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """The picture; panels stand in rows of COLUMNS."""
    height = TOP + EACH_Y * -(-len(panels) // COLUMNS)
    counts = sorted({gpus for panel in panels for gpus in (*panel.seen, *panel.told)}) or [1]
    parts = [
        *opened(title, subtitle, height, map(_said, panels), LINES),
        *_legend(20, 76),
    ]
    for number, panel in enumerate(panels):
        x, y = LEFT + EACH_X * (number % COLUMNS), TOP + EACH_Y * (number // COLUMNS)
        parts += _panel(panel, x, y, counts)
    return "\n".join([*parts, "</svg>", ""])


def _legend(x: float, y: float) -> list[str]:
    parts = []
    for kind, words, at in (("seen", "measured", x), ("told", "foretold", x + 120), ("goal", "goal", x + 240)):
        parts += [f'<line class="{kind}" x1="{at}" y1="{y - 4}" x2="{at + 24}" y2="{y - 4}"/>']
        parts += [text("dim", at + 32, y, words)]
    return parts


def _panel(panel: Panel, x: float, y: float, counts: Sequence[int]) -> list[str]:
    left, top = x + INSET, y + 28

    def place(gpus: int, share: float) -> tuple[float, float]:
        across = log2(gpus / counts[0]) / log2(counts[-1] / counts[0]) if len(counts) > 1 else 0.5
        inside = min(max(share, LOWEST), HIGHEST)
        return left + PLOT_X * across, top + PLOT_Y * (HIGHEST - inside) / (HIGHEST - LOWEST)

    parts = [text("text name small", x, y + 12, panel.name)]
    for share in (0.6, 0.8, 1.0):
        height = place(counts[0], share)[1]
        parts += [f'<line class="grid" x1="{left}" y1="{height:.1f}" x2="{left + PLOT_X}" y2="{height:.1f}"/>']
        parts += [text("dim small", x, height + 4, f"{share:.0%}")]
    height = place(counts[0], panel.goal)[1]
    parts += [f'<line class="goal" x1="{left}" y1="{height:.1f}" x2="{left + PLOT_X}" y2="{height:.1f}"/>']
    parts += [text("dim small", place(gpus, LOWEST)[0] - 3, top + PLOT_Y + 16, f"{gpus}") for gpus in counts]
    for kind, points in (("told", panel.told), ("seen", panel.seen)):
        ends = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in sorted(points.items()))
        parts += [f'<polyline class="{kind}" points="{ends}"/>'] if points else []
    for gpus, share in panel.seen.items():
        across, down = place(gpus, share)
        parts += [f'<circle class="dot" cx="{across:.1f}" cy="{down:.1f}" r="3.5"/>']
    if len(panel.seen) > 1:
        last = max(panel.seen)
        words = f"{panel.seen[last]:.1%} on {last}"
        parts += [text("text value small", left + PLOT_X - 60, place(last, SAID)[1], words)]
    return parts


def _said(panel: Panel) -> str:
    seen = ", ".join(f"{share:.0%} on {gpus} GPUs" for gpus, share in sorted(panel.seen.items()))
    return f"{panel.name} {seen or 'not measured'}"
