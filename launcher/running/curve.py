"""A curve of any length in little memory, and its picture in one line of text."""

from __future__ import annotations

import math

MOST = 128  # buckets; twice what is drawn
BLOCKS = "▁▂▃▄▅▆▇█"


class Curve:
    """Means over equally many values each; when there are too many of them, neighbours are joined."""

    def __init__(self) -> None:
        self.last: float | None = None
        self.least = math.inf
        self._width = 1  # values of a whole bucket
        self._buckets: list[tuple[float, int]] = []  # sum and count

    def add(self, value: object) -> None:
        """Take one more value; what is no finite number is left out."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            return
        self.last, self.least = value, min(self.least, value)
        total, count = self._buckets[-1] if self._buckets else (0.0, self._width)
        if count < self._width:
            self._buckets[-1] = (total + value, count + 1)
            return
        if len(self._buckets) == MOST:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
            self._buckets = [(a + b, m + n) for (a, m), (b, n) in pairs]
            self._width *= 2
        self._buckets.append((value, 1))

    def means(self, most: int) -> list[float]:
        """The whole curve as at most `most` means."""
        step = max(1, math.ceil(len(self._buckets) / most))
        groups = (self._buckets[i : i + step] for i in range(0, len(self._buckets), step))
        return [sum(total for total, _ in group) / sum(count for _, count in group) for group in groups]


def sparkline(values: list[float]) -> str:
    """One block a value, from the least to the greatest.

    Example:
        >>> sparkline([3.0, 2.0, 1.0, 1.0])
        '█▅▁▁'
    """
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    scale = (len(BLOCKS) - 1) / span if span > 0 else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)
