"""Which steps of a measured run count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

WARM_UP = 4  # steps that are not counted, at most a third of all

T = TypeVar("T")


def steady(steps: Sequence[T], warm_up: int = WARM_UP) -> Sequence[T]:
    """Those after the first ones, in which kernels are compiled and memory grows.

    Example:
        >>> steady([9, 5, 3, 1, 1, 1]), steady(range(100))
        ([3, 1, 1, 1], range(4, 100))
    """
    return steps[min(warm_up, len(steps) // 3) :]
