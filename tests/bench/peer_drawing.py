"""A bar chart of two sides as one SVG file: no script, no font of its own, for bright and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

Bar = tuple[str, str, float, float]  # name, what it is, the peer's value, ours

WIDTH, LEFT, LONGEST = 780, 252, 440  # pixels: the whole, where bars begin, the longest one
TOP, EACH, THICK, GAP = 104, 68, 22, 3  # where the first pair begins, of a pair, of a bar, between its two
STYLE = """
svg { color-scheme: light dark; font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px }
.back { fill: #ffffff; stroke: #d5dae0 } .text { fill: #20262d } .dim { fill: #5a6570 }
.peer { fill: #b3bcc5 } .ours { fill: #17698c } .ratio { fill: #ffffff; font-weight: 600 }
.name, .title { font-weight: 600 } .title { font-size: 16px } .value { font-variant-numeric: tabular-nums }
@media (prefers-color-scheme: dark) {
.back { fill: #161b21; stroke: #343c45 } .text { fill: #e4e8ec } .dim { fill: #9da8b3 }
.peer { fill: #5d6873 } .ours { fill: #56b4d6 } .ratio { fill: #0d1217 }
}
"""


def drawn(title: str, subtitle: str, bars: Sequence[Bar]) -> str:
    """The chart: of each pair the peer's bar above ours, our bar with how many times the peer's it is."""
    height = TOP + EACH * len(bars) + 6
    longest = max(value for bar in bars for value in bar[2:])
    parts = [
        *opened(title, f"{subtitle}. Longer is faster.", height, map(_said, bars)),
        *_legend(LEFT, 82),
    ]
    for number, bar in enumerate(bars):
        parts += _pair(bar, TOP + EACH * number, LONGEST / longest)
    return "\n".join([*parts, "</svg>", ""])


def opened(title: str, subtitle: str, height: float, said: Iterable[str], style: str = "") -> list[str]:
    """How a picture begins: its frame and headings; `said` is what it shows in words, `style` what it adds."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}: {escape('; '.join(said))}</title>",
        f"<style>{STYLE}{style}</style>",
        f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        text("text title", 20, 32, title),
        text("dim", 20, 52, subtitle),
    ]


def _legend(x: int, y: int) -> list[str]:
    """One line with both sides' colours."""
    parts = []
    for side, words, at in (("peer", "ms-swift, its fastest setting", x), ("ours", "launcher", x + 215)):
        parts += [f'<rect class="{side}" x="{at}" y="{y - 10}" width="12" height="12" rx="2"/>']
        parts += [text("dim", at + 18, y, words)]
    return parts


def _pair(bar: Bar, y: float, scale: float) -> list[str]:
    name, what, peer, ours = bar
    parts = [text("text name", 20, y + 18, name), text("dim", 20, y + 36, what)]
    for side, value, top in (("peer", peer, y), ("ours", ours, y + THICK + GAP)):
        length = value * scale
        parts += [f'<rect class="{side}" x="{LEFT}" y="{top}" width="{length:.1f}" height="{THICK}" rx="2"/>']
        parts += [text("text value", LEFT + length + 8, top + 16, f"{value:.2f}")]
    return [*parts, text("ratio", LEFT + 8, y + THICK + GAP + 16, f"{ours / peer:.1f} ×")]


def text(kind: str, x: float, y: float, words: str) -> str:
    """One line of it, escaped."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _said(bar: Bar) -> str:
    name, _, peer, ours = bar
    return f"{name} {peer:.2f} by ms-swift, {ours:.2f} by launcher"
