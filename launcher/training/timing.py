"""Where the time of an optimizer step goes, measured on every rank without waiting for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, TypeVar

import torch

DATA_WAIT = "data_wait"
PARTS = (DATA_WAIT, "forward", "backward", "optimizer")
T = TypeVar("T")


class Stopwatch:
    """Times of the parts of one step on this rank; what lies between, such as agreeing with other ranks, is in none.

    On CUDA a part is the time between two events on the current stream, so kernels count rather than their launches;
    waiting for data is the processor's time everywhere.
    """

    def __init__(self, device: torch.device) -> None:
        self.label: Callable[[str], AbstractContextManager[Any]] = nullcontext  # a profiler's name for what runs inside
        self._on_gpu = device.type == "cuda"
        self._device, self._peak = device, 0
        self.fullest = -1  # place in PARTS of the part in which most memory was taken so far; -1: before any step
        self._spans: list[tuple[str, Any, Any]] = []
        self.begin()

    def begin(self) -> None:
        """A new step begins now."""
        self._spans.clear()
        self._begun = perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return perf_counter() - self._begun

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Add the time of the body to a part of the step."""
        with self.label(part):
            begin = self._now(part)
            yield
            self._spans.append((part, begin, self._now(part)))
        if self._on_gpu:
            self._note_peak(part)

    def each(self, part: str, items: Iterable[T]) -> Iterator[T]:
        """The items; waiting for them counts as a part of the step."""
        remaining = iter(items)
        while True:
            with self.span(part):
                item = next(remaining, None)
            if item is None:
                return
            yield item

    def _note_peak(self, part: str) -> None:
        """Allocations count when they are asked for, so that the kernels of the part need not be done."""
        peak = torch.cuda.max_memory_allocated(self._device)
        if peak > self._peak:
            self._peak, self.fullest = peak, PARTS.index(part)

    def seconds(self) -> list[float]:
        """Seconds of each of PARTS; on CUDA to be called once the step's work is known to be done."""
        total = dict.fromkeys(PARTS, 0.0)
        for part, begin, end in self._spans:
            total[part] += end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
        return list(total.values())

    def _now(self, part: str) -> Any:
        if not self._on_gpu or part == DATA_WAIT:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_memory_gib(device: torch.device) -> tuple[float, float]:
    """Most memory that tensors took, and that torch held for them, on this rank's GPU so far; zeros on CPU."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30


def over_ranks(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Fields of a step line from each rank's seconds of PARTS, its tokens, those of its fullest micro-batch,
    `peak_memory_gib`, and `Stopwatch.fullest`.

    The longest wait for data is told, since all ranks wait for that one; the other times are means.
    """
    wait, forward, backward, optimizer, tokens, most_tokens, memory, reserved, fullest = zip(*rows, strict=True)
    of_ranks: dict[str, list[float]] = {
        f"{part}_s": [round(value, 6) for value in values]
        for part, values in zip(PARTS, (wait, forward, backward, optimizer), strict=True)
    }
    fields = {name: sum(values) / len(values) for name, values in of_ranks.items()}
    fields[f"{DATA_WAIT}_s"] = max(wait)
    of_ranks["tokens"] = [int(count) for count in tokens]
    of_ranks["fullest_tokens"] = [int(count) for count in most_tokens]
    if any(memory):
        of_ranks["memory_gib"] = [round(value, 3) for value in memory]
        of_ranks["memory_reserved_gib"] = [round(value, 3) for value in reserved]
        fields |= {"memory_gib": max(memory), "memory_reserved_gib": max(reserved)}
    told: dict[str, Any] = {name: round(value, 6) for name, value in fields.items()}
    if any(memory):
        place = int(fullest[memory.index(max(memory))])
        told["memory_moment"] = "loading" if place < 0 else PARTS[place]
    return {**told, "ranks": of_ranks}
