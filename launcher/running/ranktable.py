"""Ranks, their GPUs and hosts as lines of the live block: one a rank while they are few, else counts and a map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.text import Text

from launcher.running.journal import Line, inside
from launcher.running.progress import Snapshot, fitting

EACH = 8  # ranks that have a line of their own
HOSTS = 8  # hosts that have one, of a run with more ranks
TOLD = 3  # of many ranks, those in trouble that are named
SILENT_S = 30.0  # without news while training, unless steps are long
SILENT_STEPS = 5
SILENT_LOADING_S = 600.0  # in every other phase: loading a large model from a slow disk takes minutes
FULL = 0.9  # of a host's memory
MARKS = {"starting": "·", "running": "■", "done": "✓", "stopped": "✓", "failed": "✗"}
BAD = "bold red"

Row = tuple[int, Text]


def rank_lines(snapshot: Snapshot, columns: int, room: int, now: float) -> list[Row]:
    """One line a rank, or a summary when there are many or the room is short."""
    statuses = snapshot.statuses
    if not statuses:
        return []
    if len(statuses) <= min(EACH, max(room, 1)):
        return [_rank_line(snapshot, rank, columns, now) for rank in sorted(statuses)]
    trouble = [rank for rank in sorted(statuses) if _trouble(snapshot, rank, now)]
    hosts = list(dict.fromkeys(str(statuses[rank].get("host")) for rank in sorted(statuses)))
    each_host = [_host_line(snapshot, host, columns) for host in hosts] if 1 < len(hosts) <= HOSTS else []
    lines = [(2, _counts(snapshot, trouble)), *each_host]
    lines += [_rank_line(snapshot, rank, columns, now) for rank in trouble[:TOLD]]
    if len(trouble) > TOLD:
        lines.append((2, Text(f"{len(trouble) - TOLD} more ranks in trouble", style=BAD)))
    lines += [(3, Text(text)) for text in [_gpu_summary(snapshot)] if text]
    return lines + [(6, row) for row in _map(snapshot, trouble, columns)]


def host_lines(snapshot: Snapshot, now: float) -> list[Row]:
    """Hosts that are out of contact, and the one that is nearest to running out of memory, when one is."""
    away = [f"{host} for {age(now - since)}" for host, since in snapshot.lost.items()]
    rows = [(0, Text(f"out of contact: {', '.join(away)}", style=BAD))] if away else []
    return rows + _memory_lines(snapshot)


def _memory_lines(snapshot: Snapshot) -> list[Row]:
    shares = {}
    for host, sample in snapshot.samples.items():
        total, free = inside(sample, "memory", "total_gib"), inside(sample, "memory", "available_gib")
        if total and free is not None and 1 - free / total > FULL:
            shares[host] = (1 - free / total, total)
    if not shares:
        return []
    host = max(shares, key=lambda name: shares[name])
    share, total = shares[host]
    more = f"; {len(shares) - 1} more over {FULL:.0%}" if len(shares) > 1 else ""
    text = f"host {host}: {share * total:.1f} of {total:.1f} GiB memory in use ({share:.0%}){more}"
    return [(1, Text(text, style="bold yellow"))]


def age(seconds: float) -> str:
    """How long ago, roughly."""
    return f"{max(0, seconds):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _trouble(snapshot: Snapshot, rank: int, now: float) -> str:
    """Why a person should look at this rank; empty when all is well."""
    status = snapshot.statuses[rank]
    if status.get("state") == "failed":
        error = status.get("error") or {}
        return f"failed: {error.get('type', 'it said no more')}"
    said = status.get("time")
    if status.get("state") in ("starting", "running") and isinstance(said, int | float):
        step_s = (snapshot.step or {}).get("step_s") or 0.0
        training = status.get("phase") == "training"
        if now - said > (max(SILENT_S, SILENT_STEPS * step_s) if training else SILENT_LOADING_S):
            return f"no news for {age(now - said)}"
    return ""


def _rank_line(snapshot: Snapshot, rank: int, columns: int, now: float) -> Row:
    status = snapshot.statuses[rank]
    state = str(status.get("state", "?"))
    doing = str(status.get("phase")) if state in ("starting", "running") else state
    trouble = _trouble(snapshot, rank, now)
    gpu = gpu_of(snapshot, rank)
    parts = [
        (0, _name(snapshot, rank)),
        (0, f"{'' if state == 'failed' else doing:<{_widest(snapshot)}}"),
        (0, trouble),
        (2, f"step {status.get('step', 0):<{len(str(snapshot.total or 0))}}"),
        *_gpu_parts(gpu),
    ]
    line = Text("  ".join(text for text in fitting(parts, columns) if text.strip()))
    if trouble:
        line.stylize(BAD)
    elif gpu and worries(gpu):
        line.stylize("yellow")
    return (1 if trouble else 2, line)


def _name(snapshot: Snapshot, rank: int) -> str:
    """`rank 3`, with its host where there are several."""
    hosts = {str(status.get("host")) for status in snapshot.statuses.values()}
    if len(hosts) < 2:
        return f"rank {rank:<2}"
    width = max(map(len, hosts)) + 1 + len(str(max(snapshot.statuses)))
    return f"{snapshot.statuses[rank].get('host')}.{rank}".ljust(width)


def _host_line(snapshot: Snapshot, host: str, columns: int) -> Row:
    """What the ranks of one host do, and its GPUs."""
    own = [status for _, status in sorted(snapshot.statuses.items()) if str(status.get("host")) == host]
    steps = [int(status.get("step") or 0) for status in own]
    width = max(len(str(status.get("host"))) for status in snapshot.statuses.values())
    parts = [
        (0, f"{host:<{width}}"),
        (0, "  ".join(f"{count} {doing}" for doing, count in _doings(own).most_common())),
        (1, f"step {steps[0]}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"),
        *((2, text) for text in _gpu_parts_of(snapshot.samples.get(host, {}).get("gpus") or [])),
    ]
    return 4, Text("  ".join(fitting(parts, columns)))


def _doings(statuses: Iterable[Line]) -> Counter[str]:
    return Counter(
        str(status.get("phase") if status.get("state") in ("starting", "running") else status.get("state"))
        for status in statuses
    )


def _widest(snapshot: Snapshot) -> int:
    return max(len(str(status.get("phase", ""))) for status in snapshot.statuses.values())


def gpu_of(snapshot: Snapshot, rank: int) -> Line | None:
    """What the monitor saw last of the GPU of a rank: the place in its list is the local rank."""
    host = snapshot.statuses[rank].get("host")
    gpus = snapshot.samples.get(str(host), {}).get("gpus") or []
    local = sum(1 for other, status in snapshot.statuses.items() if status.get("host") == host and other < rank)
    return gpus[local] if local < len(gpus) else None


def worries(gpu: Line) -> list[str]:
    """Reasons of lower clocks that somebody should look into: heat and the power supply, not the power limit."""
    return [name for name in gpu.get("throttle") or [] if "thermal" in name or name.startswith("hw_")]


def _gpu_parts(gpu: Line | None) -> list[tuple[int, str]]:
    if gpu is None:
        return []
    used, total = gpu.get("memory_used_gib"), gpu.get("memory_total_gib")
    return [
        (1, f"{used:5.1f}/{total:.0f} GiB" if used is not None and total is not None else ""),
        (1, _with_unit(gpu.get("util_percent"), "%")),
        (3, _with_unit(gpu.get("power_w"), "W")),
        (0, ", ".join(name.replace("_", " ") for name in worries(gpu))),
    ]


def _with_unit(value: Any, unit: str) -> str:
    return "" if value is None else f"{value:3.0f} {unit}"


def _counts(snapshot: Snapshot, trouble: list[int]) -> Text:
    """How many ranks do what, and the one furthest behind."""
    statuses = snapshot.statuses
    states = _doings(statuses.values())
    line = Text(f"{len(statuses)} ranks  " + "  ".join(f"{count} {state}" for state, count in states.most_common()))
    steps = {rank: int(status.get("step") or 0) for rank, status in statuses.items()}
    slowest = min(steps, key=lambda rank: steps[rank])
    if max(steps.values()) - steps[slowest] > 1:  # one apart is only the time of writing
        line.append(f"  behind: rank {slowest} at step {steps[slowest]}")
    if trouble:
        line.stylize("bold")
    return line


def _gpu_summary(snapshot: Snapshot) -> str:
    gpus = [gpu for sample in snapshot.samples.values() for gpu in sample.get("gpus") or []]
    if not gpus:
        return ""
    hot = sum(1 for gpu in gpus if worries(gpu))
    parts = [f"{len(gpus)} GPUs", *_gpu_parts_of(gpus)]
    return "  ".join(parts + ([f"{hot} slowed down by heat or power supply"] if hot else []))


def _gpu_parts_of(gpus: list[Line]) -> list[str]:
    """Memory, use and power of several GPUs, from the least to the most."""
    parts = []
    for name, form, unit in (("memory_used_gib", ".1f", "GiB"), ("util_percent", ".0f", "%"), ("power_w", ".0f", "W")):
        values = [gpu[name] for gpu in gpus if gpu.get(name) is not None]
        if values:
            low, high = f"{min(values):{form}}", f"{max(values):{form}}"
            parts.append(f"{low if low == high else f'{low}–{high}'} {unit}")
    return parts


def _map(snapshot: Snapshot, trouble: list[int], columns: int) -> list[Text]:
    """A mark for each rank, in rows."""
    width = min(64, columns)
    line = Text()
    for rank, status in sorted(snapshot.statuses.items()):
        bad = rank in trouble
        line.append("!" if bad and status.get("state") != "failed" else MARKS.get(str(status.get("state")), "?"))
        if bad:
            line.stylize(BAD, len(line) - 1)
    return [line[start : start + width] for start in range(0, len(line), width)]
