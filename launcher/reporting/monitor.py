"""What the monitor saw, put in order by GPU, host and network port."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.reporting.chart import Row, Trace, Value, color, dash, line
from launcher.reporting.numbers import gpus
from launcher.reporting.record import Record, known, number, part_of
from launcher.running.journal import Line

Looks = Sequence[tuple[float, Line]]  # time, what was seen


def gpu_looks(record: Record) -> dict[str, Looks]:
    """By GPU, under the name to show."""
    several = len({str(entry.get("host")) for entry in record.monitor}) > 1
    found: dict[str, list[tuple[float, Line]]] = {}
    for entry in record.monitor:
        for gpu in gpus(entry):
            name = f"GPU {gpu.get('index')}" + (f" on {entry.get('host')}" if several else "")
            found.setdefault(name, []).append((entry["time"], gpu))
    return dict(found)


def host_looks(record: Record) -> dict[str, Looks]:
    """By host."""
    found: dict[str, list[tuple[float, Line]]] = {}
    for entry in record.monitor:
        found.setdefault(str(entry.get("host")), []).append((entry["time"], entry))
    return dict(found)


def port_looks(record: Record, kind: str) -> dict[str, Looks]:
    """By port, of `network` or `infiniband`; the ports with the most traffic first."""
    hosts = host_looks(record)
    found: dict[str, list[tuple[float, Line]]] = {}
    for host, looks in hosts.items():
        for moment, entry in looks:
            for port, rates in part_of(entry, kind).items():
                if isinstance(rates, dict):
                    found.setdefault(f"{host} {port}" if len(hosts) > 1 else port, []).append((moment, rates))
    return {name: found[name] for name in sorted(found, key=lambda name: -traffic(found[name]))}


def traffic(looks: Looks) -> float:
    """Sum of all rates of a port: only good for telling the busy from the quiet."""
    return sum(known(number(rates.get(key)) for _, rates in looks for key in ("rx_mib_s", "tx_mib_s")))


def values(looks: Looks, key: str) -> list[float]:
    """What is known of a value over all looks."""
    return known(number(entry.get(key)) for _, entry in looks)


def curves(
    record: Record, found: dict[str, Looks], value: Callable[[Line], object], *, legend: bool, form: str = ",.4~g"
) -> list[Trace]:
    """One line a thing over minutes, those left out that never had the value."""
    traces = []
    for index, (name, looks) in enumerate(found.items()):
        ys: list[Value] = [number(value(entry)) for _, entry in looks]
        if known(ys):
            xs = [record.minutes(moment) for moment, _ in looks]
            style = {"dash": dash(index), "width": 1.5, "legendgroup": f"thing {index}", "showlegend": legend}
            traces.append(line(name, xs, ys, color(index), form=form, beside=len(found), **style))
    return traces


def rows_of(
    record: Record,
    found: dict[str, Looks],
    wanted: Sequence[tuple[str, str, Callable[[Line], object]]],
) -> list[Row]:
    """A row for each (title, format, value) that was seen; only the first one fills the legend."""
    rows: list[Row] = []
    for title, form, value in wanted:
        traces = curves(record, found, value, legend=not rows, form=form)
        if traces:
            rows.append(Row(title=title, traces=traces, from_zero=True))
    return rows


def why_none(record: Record, what: str, *, notes: bool = False) -> str:
    """A sentence on why the monitor saw none of `what`; with `notes`, what it noted itself, which is about GPUs."""
    if not record.monitor:
        off = part_of(record.config, "logging").get("monitor_every_s", 0) is None
        return "The monitor was off (logging.monitor_every_s=null)." if off else "The monitor wrote nothing."
    lists = [entry["notes"] for entry in record.monitor if isinstance(entry.get("notes"), list)] if notes else []
    said = "; ".join(dict.fromkeys(str(text) for texts in lists for text in texts))
    return f"The monitor saw no {what}{f': {said}' if said else ''}."
