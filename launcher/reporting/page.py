"""A run folder -> report.html, one page that opens without a network."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.reporting.chart import Chart
from launcher.reporting.data import data_table, lengths_chart
from launcher.reporting.foresight import foresight_charts
from launcher.reporting.headline import facts, failures, tiles, tone
from launcher.reporting.machines import gpu_table, machine_charts
from launcher.reporting.numbers import summarise
from launcher.reporting.plots import training_charts
from launcher.reporting.reality import reality_table
from launcher.reporting.record import Record, read_record
from launcher.reporting.table import Table
from launcher.reporting.tables import (
    bad_rows,
    environment_table,
    eval_table,
    file_table,
    log_tails,
    profile_table,
    rank_table,
    step_table,
    texts,
    time_table,
)
from launcher.reporting.timing import timing_charts
from launcher.rundir import RunDir, write_atomic

TEMPLATES = Path(__file__).parent / "templates"
GENERATOR = "launcher report"  # in a page's head: it is ours to replace
SHOWN_WARNINGS = 20


def write_report(run: RunDir) -> Path:
    """Write `report.html` of one run and return its path; works for runs that go on, failed or never trained.

    Raises ConfigError when the folder has no plan that can be read.
    """
    return write_page(read_record(run))


def write_page(record: Record) -> Path:
    """Write `report.html` into the folder of a run that has been read."""
    write_atomic(record.run.report, run_page(record))
    return record.run.report


def run_page(record: Record) -> str:
    """The page of one run."""
    charts = [
        *training_charts(record),
        *timing_charts(record),
        *foresight_charts(record),
        *machine_charts(record),
        lengths_chart(record),
    ]
    tables = [
        reality_table(record),
        eval_table(record),
        data_table(record),
        rank_table(record),
        gpu_table(record),
        profile_table(record),
        environment_table(record),
        file_table(record),
        time_table(record),
        step_table(record),
    ]
    warnings, dropped = _warnings(record), bad_rows(record)
    absent = [
        *without_data(charts, tables),
        *(["Warnings: none."] if not warnings else []),
        *(["Rows that were dropped: none."] if dropped == 0 else []),
    ]
    return render(
        "run.html",
        charts,
        title=record.name,
        record=record,
        tone=tone(record),
        facts=facts(record),
        failures=failures(record),
        tails=log_tails(record),
        tiles=tiles(record, summarise(record)),
        tables=tables,
        absent=absent,
        warnings=warnings,
        bad_rows=dropped,
        plan_text=_plan_text(record),
        texts=texts(record),
    )


def render(template: str, charts: Iterable[Chart], **values: Any) -> str:
    """A page from a template: plots and plotly.js inside, and no address of anything outside."""
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = _in_full_rows([chart for chart in charts if chart.figure])
    scripts = [_inside_script(get_plotlyjs()), (TEMPLATES / "page.js").read_text(encoding="utf-8")]
    drawn = {
        chart.id: {**chart.figure, "switches": [_switch(switch) for switch in chart.switches]}
        for chart in charts
        if chart.figure is not None
    }
    return environment.get_template(template).render(
        charts=charts,
        figures=_json(drawn),
        scripts=scripts,
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        # Whatever a log or a name smuggles in, the browser runs these two scripts only and fetches nothing.
        script_hashes=" ".join(f"'sha256-{_hash(script)}'" for script in scripts),
        generator=GENERATOR,
        version=__version__,
        made=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        **values,
    )


def without_data(charts: Iterable[Chart], tables: Iterable[Table]) -> list[str]:
    """What a page has no plot or table of, each with its reason."""
    found = [f"{chart.title}: {chart.why}" for chart in charts if not chart.figure]
    return found + [f"{table.title}: {table.why}" for table in tables if not table.rows and table.why]


def _in_full_rows(charts: Sequence[Chart]) -> list[Chart]:
    """The charts, the last narrow one made wide when it would have no neighbour: they stand two in a row."""
    narrow = [index for index, chart in enumerate(charts) if not chart.wide]
    if len(narrow) % 2 == 0:
        return list(charts)
    return [dataclasses.replace(c, wide=c.wide or index == narrow[-1]) for index, c in enumerate(charts)]


def is_own_page(path: Path) -> bool:
    """Whether a file is a page that `render` made."""
    with open(path, "rb") as file:
        return f'<meta name="generator" content="{GENERATOR}'.encode() in file.read(4096)


def _switch(switch: Any) -> dict[str, Any]:
    return {"label": switch.label, "layout": switch.layout, "visible": switch.visible}


def _json(value: Any) -> str:
    """JSON that may stand inside a script element: no character in it begins a tag."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _inside_script(script: str) -> str:
    if "</script" in script.lower() or "<!--" in script:
        raise ValueError("plotly.js holds the end of a script element")
    return script


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _warnings(record: Record) -> list[str]:
    """Those of the plan, then the last ones of the run."""
    planned = record.plan.get("warnings")
    said = [str(event.get("text")) for event in record.events if event.get("event") == "warning"]
    return [*map(str, planned if isinstance(planned, list) else []), *dict.fromkeys(said[-SHOWN_WARNINGS:])]


def _plan_text(record: Record) -> str:
    plan = record.whole_plan()
    if plan is None:
        return f"This plan was written by launcher {record.plan.get('version')} and cannot be shown by {__version__}."
    from launcher.planning.describe import describe

    return describe(plan)
