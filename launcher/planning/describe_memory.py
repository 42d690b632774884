"""The part of a plan's text that says whether it fits: one GPU drawn as a bar, the host's memory, disk."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.planning import lines
from launcher.planning.gpus import ASSUMED_KIND, GPU_KINDS
from launcher.planning.pictures import FREE, KEPT_FREE, letters, memory_bar
from launcher.spec import RunPlan

BAR = 74  # characters: with edges and indent a line of 80
MOMENTS = {
    "loading": "while the model is loaded",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
}


def memory_lines(plan: RunPlan) -> list[str]:
    """The fullest moment of one GPU (or CPU rank) by part, then host and disk."""
    each = "GPU" if plan.device == "cuda" else "rank"
    moment = f", fullest {MOMENTS.get(plan.memory_moment, plan.memory_moment)}" if plan.memory_moment else ""
    parts = {name: size for name, size in plan.memory.items() if size}
    marks = letters(parts)
    capacity = capacity_of(plan)
    headroom = plan.config.memory.headroom
    total = sum(parts.values())
    rows = [(marks[name], name, lines.gib(size), share(size, capacity)) for name, size in parts.items()]
    rows.append(("", "total", lines.gib(total), share(total, capacity)))
    if capacity is not None:
        rows += _room_rows(capacity, total, headroom, each)
    return [
        f"Memory of one {each}, GiB, estimated{moment}",
        f"  {memory_bar(parts, capacity, headroom, marks, BAR)}",
        *lines.table(rows, right=(2, 3)),
        *_beside(plan),
    ]


def capacity_of(plan: RunPlan) -> int | None:
    """Bytes of one GPU or rank that the plan reckons with, None when not known."""
    if plan.memory_capacity is None and plan.device == "cuda":
        return GPU_KINDS[ASSUMED_KIND].memory_bytes
    return plan.memory_capacity


def share(size: float, capacity: int | None) -> str:
    """Of the whole GPU."""
    return f"{100 * size / capacity:.1f} %" if capacity else ""


def _room_rows(capacity: int, total: int, headroom: float, each: str) -> list[tuple[str, str, str, str]]:
    kept = round(headroom * capacity)
    left = capacity - kept - total
    rows = [(FREE, "free", lines.gib(left), share(left, capacity))] if left >= 0 else []
    if left < 0:
        rows.append(("", "too much", lines.gib(-left), share(-left, capacity)))
    rows.append((KEPT_FREE, "kept free (memory.headroom)", lines.gib(kept), share(kept, capacity)))
    return [*rows, ("", f"of the {each}", lines.gib(capacity), "")]


def _beside(plan: RunPlan) -> list[str]:
    """Main memory of a host and disk: a line each."""
    rows = [
        (name, lines.gib(sum(parts.values())), _listed(parts))
        for name, parts in (("main memory of a host", plan.host_memory), ("disk", plan.disk))
        if sum(parts.values())
    ]
    return lines.table_with_text([("beside it, GiB", "", ""), *rows], right=(1,)) if rows else []


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {lines.gib(size)}" for name, size in parts.items() if size)
