"""CUDA out of memory, told in the plan's own parts: what was planned, what was there, which part was underestimated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from launcher.arithmetic import smaller_micro_batch
from launcher.errors import GpuMemoryError, Problem
from launcher.estimates import CONTEXT, FRAGMENTS, grows_with_tokens
from launcher.spec import RunPlan
from launcher.training.batching import MicroBatch

GIB = 2**30
_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+) ([KMG]?i?B)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Bytes of one GPU when it had no more."""

    states: int | None  # held before the first micro-batch: weights, optimizer and the like; None: it came before that
    peak: int  # the most that tensors have taken
    asked: int  # the allocation that failed
    reserved: int  # held by torch
    free: int
    total: int


class MemoryWatch:
    """Follows a rank, so that running out of memory can be told."""

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.moment, self.tokens = "loading the model", 0
        self.most_tokens = 0  # of a micro-batch of the latest step
        self._states: int | None = None

    def at(self, moment: str) -> None:
        """What begins now."""
        self.moment, self.tokens = moment, 0

    def each(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches of a step, each noted before it is used."""
        if self._states is None and self.device.type == "cuda":
            self._states = torch.cuda.memory_allocated(self.device)
        self.most_tokens = 0
        for number, batch in enumerate(batches):
            self.moment, self.tokens = f"micro-batch {number + 1} of a step", batch.tokens
            self.most_tokens = max(self.most_tokens, batch.tokens)
            yield batch
        self.at("the optimizer's step")

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raise GpuMemoryError for torch's OutOfMemoryError in the body."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise explain(self.plan, self.moment, self.tokens, self._seen(str(error))) from error

    def _seen(self, message: str) -> Seen:
        asked = _ASKED.search(message)
        free, total, peak, reserved = 0, 0, 0, 0
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            peak, reserved = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        size = int(float(asked[1]) * _UNITS.get(asked[2], 1)) if asked else 0
        return Seen(states=self._states, peak=peak, asked=size, reserved=reserved, free=free, total=total)


def explain(plan: RunPlan, moment: str, tokens: int, seen: Seen) -> GpuMemoryError:
    """The error for people. Its `details` are what a restart needs: the tokens that were too many, and the part that
    the plan had too small."""
    found = compared(plan, seen)
    part, planned, there = max(found, key=lambda row: row[2] - row[1])
    lines = [
        f"CUDA out of memory in {moment}" + (f" of {tokens:,} tokens" if tokens else ""),
        f"{seen.asked / GIB:.2f} GiB more were asked for, and {seen.free / GIB:.2f} of {seen.total / GIB:.1f} GiB "
        "were free",
        *(f"{name}: {size / GIB:.1f} GiB planned, {real / GIB:.1f} GiB here" for name, size, real in found),
        f"underestimated most: {part}" if there > planned else "every part is as planned: the plan was too tight",
    ]
    tries = list(_tries(plan, tokens))
    if plan.config.restart.max == 0 and tokens:
        tries.append("restart.max=2   (goes on by itself with smaller micro-batches: the loss stays the same)")
    details = {"tokens": tokens, "part": part, "planned_bytes": planned, "seen_bytes": there}
    return GpuMemoryError(Problem("\n".join(lines), tries=tuple(tries)), title="with GPU memory", details=details)


def _tries(plan: RunPlan, tokens: int) -> Iterator[str]:
    """What to type that the plan does not have yet."""
    config = plan.config
    if tokens:
        yield f"batch.max_tokens={smaller_micro_batch(plan.batch.max_tokens, tokens)}"
    if plan.checkpointed_layers < plan.layers:
        yield "memory.gradient_checkpointing=all"
    fixed = [("zero", config.zero.name), ("batch.max_tokens", config.batch.max_tokens)]
    if words := " ".join(f"{key}=auto" for key, value in fixed if value != "auto"):
        yield words
    if "auto" in (config.zero.name, config.batch.max_tokens, config.memory.gradient_checkpointing):
        yield f"memory.headroom={min(0.9, config.memory.headroom + 0.1):.2g}   (plans with more to spare)"


def compared(plan: RunPlan, seen: Seen) -> list[tuple[str, int, int]]:
    """(part, bytes planned, bytes seen), coarse enough that torch can tell the parts apart."""
    load = sum(size for part, size in plan.memory.items() if grows_with_tokens(part))
    context, fragments = plan.memory.get(CONTEXT, 0), plan.memory.get(FRAGMENTS, 0)
    states = sum(plan.memory.values()) - load - context - fragments
    needed = seen.peak + seen.asked
    others = ("the CUDA context and other processes", context, max(0, seen.total - seen.free - seen.reserved))
    if seen.states is None:
        return [("weights, optimizer and the like", states, needed), others]
    return [
        ("weights, optimizer and the like", states, seen.states),
        ("what grows with the tokens of a micro-batch", load, needed - seen.states),
        ("fragmentation", fragments, max(0, seen.reserved - seen.peak)),
        others,
    ]
