"""What a plan.json foretold of memory and time, and one line that holds it against what came."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from launcher.estimates import CONTEXT, FRAGMENTS
from launcher.reporting import words
from launcher.reporting.record import known, number, part_of
from launcher.running.journal import Line

BYTES_A_GIB = 2**30
OUTSIDE = (CONTEXT, "context")  # of torch's allocator; the second as earlier plans named it
LAST_STEPS = 100  # whose mean time is told


def planned_parts(plan: Line) -> dict[str, float]:
    """GiB of one GPU or rank by part, as planned."""
    return {name: (number(value) or 0.0) / BYTES_A_GIB for name, value in part_of(plan, "memory").items()}


def planned_allocated_gib(plan: Line) -> float | None:
    """The plan's peak of torch's tensors on one GPU or rank."""
    return _without(plan, *OUTSIDE, FRAGMENTS)


def planned_reserved_gib(plan: Line) -> float | None:
    """The plan's peak of what torch's allocator holds on one GPU or rank."""
    return _without(plan, *OUTSIDE)


def planned_whole_gib(plan: Line) -> float | None:
    """The plan's peak of one GPU or rank."""
    return _without(plan)


def _without(plan: Line, *left_out: str) -> float | None:
    parts = planned_parts(plan)
    return sum(value for name, value in parts.items() if name not in left_out) if parts else None


def planned_step_s(plan: Line) -> float | None:
    """Seconds of a step as planned; None of a plan without (a CPU's has none)."""
    return number(part_of(plan, "time").get("step_s")) or None


def foretold_line(plan: Line, steps: Sequence[Line]) -> str | None:
    """Memory and step time as planned and as they were; None when nothing can be compared."""
    found = []
    memory = planned_reserved_gib(plan)
    peak = max(known(number(line.get("memory_reserved_gib")) for line in steps), default=None)
    if memory is not None and peak is not None:
        found.append(f"memory planned {words.gib(memory)}, peak {words.gib(peak)}")
    planned, times = planned_step_s(plan), known(number(line.get("step_s")) for line in steps[-LAST_STEPS:])
    if planned is not None and times:
        of = " for the longest prompts" if str(part_of(plan, "time").get("load")).startswith("assumed") else ""
        found.append(f"step planned {words.seconds(planned)}{of}, took {words.seconds(statistics.median(times))}")
    return "; ".join(found) or None
