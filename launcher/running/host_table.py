"""`check hosts`: the checks that every start makes, alone, and a table of what was found."""

from __future__ import annotations

import queue
import sys
from collections.abc import Mapping
from typing import IO, Any, cast

from launcher.errors import ConfigError, ExitCode, Problem
from launcher.planning.fabric import Fabric
from launcher.planning.nccl_hosts import LABELS, links_of, network_of
from launcher.running.findings import several
from launcher.running.preflight import Checked, check, startable
from launcher.running.transport import Event, close_all, open_channels
from launcher.spec import Host, RunPlan
from launcher.streams import SafeStream

Rows = list[tuple[str, ...]]

HEAD = ("host", "reached", "python", "torch", "GPUs", "driver", "processors", "memory", "disk", "run folder", "address")
FABRIC_HEAD = ("host", "network", "RDMA ports", "interface", "GPU links", "GPUDirect", "NCCL")
GIB = 2**30
UNKNOWN = "-"


def check_hosts(plan: RunPlan) -> int:
    """Ask all hosts, print what they said; raises what would keep the run from starting."""
    startable(plan)
    if plan.transport in ("env", "manual"):
        text = f"cluster.transport={plan.transport} reaches no host from here: its launchers check them when they meet"
        raise ConfigError(Problem(text, tries=("cluster.transport=ssh",)))
    inbox: queue.Queue[Event] = queue.Queue()
    channels = open_channels(plan, inbox)
    try:
        checked = check(plan, channels, supplied=False)
    finally:
        close_all(list(channels.values()))
    out = cast(IO[str], SafeStream(sys.stdout))
    show([_row(host, checked) for host in plan.hosts], out, pretty=sys.stdout.isatty())
    if checked.fabrics:
        print(file=out)
        show([_fabric_row(host, checked) for host in plan.hosts], out, pretty=sys.stdout.isatty(), head=FABRIC_HEAD)
    for text in (*checked.notes, *checked.nccl):
        print(text, file=out)
    for text in checked.plan.warnings:
        print(f"warning: {text}", file=out)
    if checked.error is not None:
        out.flush()
        raise checked.error
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    print(f"{several([host.name for host in plan.hosts])}: nothing keeps {ranks} from starting", file=out, flush=True)
    return int(ExitCode.OK)


def show(rows: Rows, out: IO[str], *, pretty: bool, head: tuple[str, ...] = HEAD) -> None:
    """The table, without the columns that say nothing; in colour and with its lines folded for a terminal."""
    kept = [n for n in range(len(head)) if n == 0 or any(row[n] != UNKNOWN for row in rows)]
    cells = [[row[n] for n in kept] for row in [head, *rows]]
    if pretty:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(*cells[0], box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for row in cells[1:]:
            table.add_row(*row, style="red" if row[1:] == [UNKNOWN] * (len(row) - 1) else None)
        Console(file=out).print(table)
        return
    widths = [max(len(row[n]) for row in cells) for n in range(len(kept))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=out)


def _row(host: Host, checked: Checked) -> tuple[str, ...]:
    look = checked.looks.get(host.name)
    if look is None or "failed" in look:
        return (host.name, *[UNKNOWN] * (len(HEAD) - 1))
    gpus = look["gpus"] if isinstance(look["gpus"], list) else []
    kinds = {gpu["name"] for gpu in gpus}
    met = checked.met
    interface = met.interfaces.get(host.name) if met else None
    own = [a["address"] for a in look["addresses"] if a["interface"] == interface and a["scope"] != "link"]
    return (
        host.name,
        f"{1000 * checked.reached_after_s[host.name]:,.0f} ms",
        look["python"],
        look["versions"].get("torch", UNKNOWN),
        f"{len(gpus)} {', '.join(sorted(kinds))}" if gpus else UNKNOWN,
        ", ".join(sorted({gpu["driver"] for gpu in gpus})) or UNKNOWN,
        str(len(look["processors"].get("allowed", ()))),
        _gib(look["memory"], "total"),
        _gib(look["folder"], "free"),
        {True: "shared", False: "its own", None: UNKNOWN}[look["folder"].get("shared")],
        f"{own[0]} ({interface})" if own else UNKNOWN,
    )


def _fabric_row(host: Host, checked: Checked) -> tuple[str, ...]:
    fabric = checked.fabrics.get(host.name, Fabric())
    network = network_of(fabric)
    name = checked.met.interfaces.get(host.name, "") if checked.met else ""
    one = fabric.interface(name)
    speed = f" {one.speed_mbps / 1000:g} Gb/s" if one is not None and one.speed_mbps else ""
    return (
        host.name,
        LABELS[network] if network else UNKNOWN,
        _ports(fabric),
        f"{name}{speed}" or UNKNOWN,
        _links(fabric, host),
        fabric.gpudirect or UNKNOWN,
        fabric.nccl_version or UNKNOWN,
    )


def _ports(fabric: Fabric) -> str:
    """`8 of 9 up, 400 Gb/s`."""
    ports = fabric.ports or ()
    rates = sorted({port.rate_gbps for port in ports if port.up and port.rate_gbps})
    count = sum(port.up for port in ports)
    told = f"{count} of {len(ports)} up" if count < len(ports) else f"{count} up"
    return (
        ", ".join([told, *([f"{' and '.join(f'{rate:g}' for rate in rates)} Gb/s"] if rates else [])])
        if ports
        else UNKNOWN
    )


def _links(fabric: Fabric, host: Host) -> str:
    """`NVLink (NV18)`, or how PCIe joins the GPUs of the run."""
    kind, words = links_of(fabric, host.gpus), ", ".join(sorted(set(fabric.among(host.gpus))))
    return {"nvlink": f"NVLink ({words})", "pcie": f"PCIe ({words})"}.get(kind or "", UNKNOWN)


def _gib(space: Mapping[str, Any], field: str) -> str:
    return f"{space[field] / GIB:,.0f} GiB" if field in space else UNKNOWN
