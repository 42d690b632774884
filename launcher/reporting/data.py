"""What the run's rows are made of and how long they are: data.json as a plot and a table."""

from __future__ import annotations

from typing import Any

from launcher.prepared import MODALITIES, SPLITS
from launcher.reporting.chart import Chart, Row, Trace, color, figure
from launcher.reporting.record import Record, number, part_of
from launcher.reporting.table import Table
from launcher.reporting.words import NONE
from launcher.running.journal import Line, read_quietly

NOT_YET = "The rows have not been prepared, so data.json is missing."
HELD_OUT = {"train": "to train on", "eval": "held out"}


def lengths_chart(record: Record) -> Chart:
    """A histogram of tokens a row, one of each split."""
    title, about = "Tokens of a row", "With all its documents; what their prompts share counts once."
    found = {split: _bins(summary) for split, summary in _summaries(record).items()}
    rows = []
    for place, (split, bins) in enumerate((split, bins) for split, bins in found.items() if bins):
        bars: Trace = {
            "type": "bar",
            "name": split,
            "x": [f"{low:,} - {high - 1:,}" for low, high, _ in bins],
            "y": [count for *_, count in bins],
            "marker": {"color": color(place)},
            "hovertemplate": "%{y:,} rows",
        }
        rows.append((split, bars))
    if not rows:
        return Chart(id="lengths", title=title, why=NOT_YET)
    parts = [Row(title=f"rows {HELD_OUT[split]}", traces=[bars], counts=True) for split, bars in rows]
    shown = figure(parts, "tokens", row_px=170, legend=False)
    # Names in the order of numbers, whichever split has them.
    names = dict(sorted((low, f"{low:,} - {high - 1:,}") for bins in found.values() for low, high, _ in bins))
    shown["layout"]["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": list(names.values())}
    shown["layout"] |= {"hovermode": "closest", "bargap": 0.05}
    return Chart(id="lengths", title=title, about=about, figure=shown)


def data_table(record: Record) -> Table:
    """What became of the rows, and what queries and documents are made of; a column for each split."""
    summaries = _summaries(record)
    columns = {split: _facts(summary) for split, summary in summaries.items()}
    names = dict.fromkeys(name for facts in columns.values() for name in facts)
    rows = [[name, *(_count(facts.get(name)) for facts in columns.values())] for name in names]
    head = ("", *(HELD_OUT[split] for split in columns))
    return Table(title="Data", head=head, rows=rows, right=tuple(range(1, len(head))), why=NOT_YET)


def _facts(summary: Line) -> dict[str, Any]:
    lengths = part_of(summary, "lengths")
    found = {
        "usable rows": summary.get("rows"),
        "bad rows": sum(number(count) or 0 for count in part_of(summary, "bad").values()),
        "too long rows": lengths.get("too_long"),
        "documents cut": lengths.get("cut"),
        "tokens": lengths.get("tokens"),
        "distinct images": summary.get("images"),
        "distinct videos": summary.get("videos"),
    }
    for what in part_of(summary, "modality"):
        counts = part_of(summary, "modality", what)
        found |= {f"{what}: {kind}": counts[kind] for kind in MODALITIES if counts.get(kind)}
    return found


def _summaries(record: Record) -> dict[str, Line]:
    found = read_quietly(record.run.data)
    return {split: part_of(found, split) for split in SPLITS if part_of(found, split)}


def _bins(summary: Line) -> list[tuple[int, int, int]]:
    """(from, below, rows); what a file holds otherwise is left out."""
    bins = part_of(summary, "lengths").get("histogram")
    whole = [one for one in bins if isinstance(one, list) and len(one) == 3] if isinstance(bins, list) else []
    return [(int(one[0]), int(one[1]), int(one[2])) for one in whole if None not in map(number, one)]


def _count(value: Any) -> str:
    found = number(value)
    return NONE if found is None else f"{found:,.0f}"
