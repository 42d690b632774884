"""Plots of what the machines did while the run went on: GPUs, hosts, networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.reporting import words
from launcher.reporting.chart import RATE, Chart, Row, Trace, color, figure, label
from launcher.reporting.monitor import Looks, gpu_looks, host_looks, port_looks, rows_of, traffic, values, why_none
from launcher.reporting.record import Record, part_of
from launcher.reporting.table import Table
from launcher.running.journal import Line

MINUTES = "minutes since the start"
SHOWN_CARDS = 64  # more lines cannot be told apart
SHOWN_PORTS = 16  # those with the most traffic; a host may have dozens of virtual ones


def machine_charts(record: Record) -> list[Chart]:
    """All of them."""
    return [
        gpu_chart(record),
        host_chart(record),
        port_chart(record, "network", "Network", "traffic on a network port"),
        port_chart(record, "infiniband", "InfiniBand", "InfiniBand port"),
    ]


def gpu_chart(record: Record) -> Chart:
    """Utilisation, memory, power, clock and throttling of every GPU."""
    title, found = "GPUs over time", gpu_looks(record)
    cards = dict(list(found.items())[:SHOWN_CARDS])
    if not cards:
        return Chart(id="gpus", title=title, why=why_none(record, "GPU", notes=True))
    rows = rows_of(
        record,
        cards,
        (
            ("utilisation, %", ".0f", _item("util_percent")),
            ("memory in use, GiB", ".1f", _item("memory_used_gib")),
            ("power, W", ".0f", _item("power_w")),
            ("SM clock, MHz", ".0f", _item("sm_clock_mhz")),
            ("temperature, °C", ".0f", _item("temperature_c")),
        ),
    )
    held = _throttle_row(record, cards)
    about = ["None was ever held back (throttled)."] if held is None else []
    if len(found) > len(cards):
        about.append(f"The first {len(cards)} of {len(found)}; the table has all.")
    shown = figure([*rows, *([held] if held else [])], MINUTES, row_px=125, legend=len(cards) > 1)
    return Chart(id="gpus", title=title, about=" ".join(about), figure=shown, wide=True)


def _item(key: str) -> Callable[[Line], Any]:
    return lambda entry: entry.get(key)


def _in_memory(key: str) -> Callable[[Line], Any]:
    return lambda entry: part_of(entry, "memory").get(key)


def _throttle_row(record: Record, cards: dict[str, Looks]) -> Row | None:
    """A mark at each look in which a GPU was held back, with the reasons; None without any.

    plotly draws no x axis under a row that is empty.
    """
    traces: list[Trace] = []
    for index, (card, looks) in enumerate(cards.items()):
        held = [(record.minutes(moment), reasons(gpu)) for moment, gpu in looks if reasons(gpu)]
        if held:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": label(card),
                    "legendgroup": f"thing {index}",
                    "showlegend": False,
                    "x": [round(minute, 4) for minute, _ in held],
                    "y": [label(card)] * len(held),
                    "text": [label(", ".join(names)) for _, names in held],
                    "marker": {"symbol": "line-ns", "size": 9, "line": {"width": 2, "color": color(index)}},
                    "hovertemplate": "%{text}",
                }
            )
    return Row(title="held back (throttled)", traces=traces, weight=0.6) if traces else None


def reasons(gpu: Line) -> list[str]:
    """What holds a GPU back in one look."""
    found = gpu.get("throttle")
    # An idle GPU lowers its clock; that holds nothing back.
    return [str(name) for name in found if "idle" not in str(name).lower()] if isinstance(found, list) else []


def gpu_table(record: Record) -> Table:
    """One row a GPU: name, utilisation, memory, power, temperature, what held it back."""
    rows = []
    for card, looks in gpu_looks(record).items():
        peak, total = (max(values(looks, key), default=None) for key in ("memory_used_gib", "memory_total_gib"))
        rows.append(
            [
                card,
                str(looks[-1][1].get("name") or words.NONE),
                words.plain(_mean(values(looks, "util_percent")), ".0f") + " %",
                f"{words.gib(peak)} of {words.gib(total)}",
                words.plain(_mean(values(looks, "power_w")), ".0f") + " W",
                words.plain(max(values(looks, "temperature_c"), default=None), ".0f") + " °C",
                ", ".join(f"{reason} {words.percent(share)}" for reason, share in throttled(looks).items()) or "never",
            ]
        )
    return Table(
        title="GPUs",
        head=("GPU", "kind", "mean use", "peak memory", "mean power", "hottest", "held back, share of looks"),
        rows=rows,
        right=(2, 3, 4, 5),
        about="Over the whole run, loading and saving included.",
    )


def throttled(looks: Looks) -> dict[str, float]:
    """Reason -> share of the looks at a GPU in which it held."""
    found: dict[str, float] = {}
    for _, gpu in looks:
        for reason in reasons(gpu):
            found[reason] = found.get(reason, 0.0) + 1 / len(looks)
    return found


def _mean(known: list[float]) -> float | None:
    return sum(known) / len(known) if known else None


def host_chart(record: Record) -> Chart:
    """Processors and memory of every host."""
    title, hosts = "Hosts over time", dict(list(host_looks(record).items())[:SHOWN_CARDS])
    wanted: list[tuple[str, str, Callable[[Line], Any]]] = [
        ("memory in use, GiB", ".1f", _in_memory("used_gib")),
        ("processors in use, %", ".0f", _item("cpu_percent")),
        ("disk free, GiB", ".1f", _item("disk_free_gib")),
    ]
    for key, name in (("swap_used_gib", "swap in use, GiB"), ("shm_used_gib", "/dev/shm in use, GiB")):
        if any(part_of(entry, "memory").get(key) for looks in hosts.values() for _, entry in looks):
            wanted.append((name, ".2f", _in_memory(key)))
    rows = rows_of(record, hosts, wanted)
    if not rows:
        return Chart(id="hosts", title=title, why=why_none(record, "host"))
    return Chart(id="hosts", title=title, figure=figure(rows, MINUTES, row_px=120, legend=len(hosts) > 1), wide=True)


def port_chart(record: Record, kind: str, title: str, what: str) -> Chart:
    """Received and sent MiB/s of every port of one kind, on every host."""
    ports = port_looks(record, kind)
    busy = dict(list(ports.items())[:SHOWN_PORTS])
    quiet = kind == "network" and not any(map(traffic, busy.values()))
    if not busy or quiet:
        return Chart(id=kind, title=title, why=why_none(record, what))
    wanted = (("received, MiB/s", RATE, _item("rx_mib_s")), ("sent, MiB/s", RATE, _item("tx_mib_s")))
    errors = {port: max(values(looks, "errors"), default=0.0) for port, looks in ports.items()}
    bad = [f"{port} {count:,.0f}" for port, count in errors.items() if count]
    about = [f"Errors counted: {', '.join(bad)}."] if bad else []
    if len(ports) > len(busy):
        about.append(f"The {SHOWN_PORTS} busiest ports of {len(ports)}.")
    rows = rows_of(record, busy, wanted)
    if not rows:
        return Chart(id=kind, title=title, why="No rate of a port could be read.")
    return Chart(id=kind, title=title, about=" ".join(about), figure=figure(rows, MINUTES, row_px=140))
