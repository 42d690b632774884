"""Relative speeds of ranks for `weight=auto`, measured before the first step.

Each rank multiplies matrices of the model's own sizes, alone: in a step of ZeRO-3 a fast rank waits in every layer for
the slow ones, so that times of steps would show all ranks as equal. What differs between GPUs beside their products
(memory, attention) is not measured; `weight=` with numbers says it better where that matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch

from launcher.spec import RunPlan
from launcher.training.models import DTYPES
from launcher.training.runtime import Rank

ROWS = 1024  # tokens of a product
ROUNDS = 7  # the median counts: what a rank does for long, not in a moment of rest or of something else
ROUND_S = 0.05


def measured_speeds(plan: RunPlan, rank: Rank, rows: int = ROWS) -> tuple[float, ...]:
    """Speed of each rank beside the fastest, in tenths: less is noise among equal GPUs. The same on every rank.

    Collective. Measured anew when a run goes on: the hosts may be others, and the loss does not depend on it.
    """
    text = plan.arch.get("text_config") or plan.arch
    hidden = int(text["hidden_size"])
    tokens = torch.ones(rows, hidden, dtype=DTYPES[plan.precision], device=rank.device)
    weight = torch.ones(hidden, 4 * hidden, dtype=tokens.dtype, device=rank.device)

    def product() -> None:
        torch.matmul(tokens, weight)
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)

    rank.gather(None)  # all at once: GPUs of one host share its power
    with torch.no_grad():
        own = usual_seconds(product)
    return relative(rank.gather(own))


def usual_seconds(work: Callable[[], None]) -> float:
    """Seconds that `work` usually takes."""
    begun, count = perf_counter(), 0
    while perf_counter() - begun < ROUND_S:  # also wakes the device from its idle clocks
        work()
        count += 1
    found = []
    for _ in range(ROUNDS):
        begun = perf_counter()
        for _ in range(count):
            work()
        found.append((perf_counter() - begun) / count)
    return median(found)


def relative(seconds: Sequence[float]) -> tuple[float, ...]:
    """Speeds of ranks from the seconds that each needs for the same work.

    Example:
        >>> relative([0.010, 0.0102, 0.031, 1.0])
        (1.0, 1.0, 0.3, 0.1)
    """
    fastest = min(seconds)
    return tuple(max(0.1, round(fastest / one, 1)) for one in seconds)
