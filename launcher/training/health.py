"""What shows that training goes wrong: steps that teach nothing, weights that get no gradient, ranks that differ.

Everything here is decided from numbers that all ranks share, so that all of them stop together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from launcher.errors import Problem, TrainingError
from launcher.families import SEEING_PARTS, Family
from launcher.spec import RunConfig
from launcher.training.batching import MicroBatch
from launcher.training.patches import Patches
from launcher.training.runtime import Rank
from launcher.training.tuning import part_of

STEPS_WITHOUT_IMAGES = 20  # after so many nobody expects one any more

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NO_ROW = "none of its rows could be used"


@dataclass
class BadSteps:
    """Counts steps whose loss is not finite or exactly 0, or whose update was skipped; too many in a row end a run."""

    config: RunConfig
    precision: str
    lr: float
    total: int = 0
    in_a_row: int = 0
    zeros: int = 0  # steps in a row whose loss is 0

    def note(self, step: int, loss: float, units: float, *, skipped: bool) -> str | None:
        """What was bad about a step, None when nothing was; `loss` and `units` (its count) are of all ranks."""
        found = self._fault(loss, units, skipped)
        self.in_a_row = 0 if found is None else self.in_a_row + 1
        self.total += found is not None
        return None if found is None else f"step {step}: {found}"

    def check(self, fault: str | None, loss_scale: float | None, *, whole_run: bool) -> None:
        """Raise TrainingError after `train.max_bad_steps` bad steps in a row, or in a run without a good one."""
        if fault is None:
            return
        # A whole run without a row is told of as that, where it ends.
        if self.in_a_row < self.config.train.max_bad_steps and (not whole_run or fault.endswith(NO_ROW)):
            return
        text = f"{self.in_a_row} steps in a row taught the model nothing; {fault}"
        if loss_scale is not None:
            text += f" (the loss scale is down to {loss_scale:g}: float16 overflows whatever it is)"
        raise TrainingError(Problem(text, tries=self._advice(fault)), title="with this training")

    def idle(self, step: int, loss: float, units: float) -> str | None:
        """A warning, once, after as many steps in a row whose loss is 0 where that may be right."""
        self.zeros = self.zeros + (units > 0) if loss == 0 else 0
        if self.zeros != self.config.train.max_bad_steps or not self._fine_at_zero:
            return None
        return f"step {step}: the loss was exactly 0 for {self.zeros} steps in a row, which taught the model nothing"

    @property
    def _fine_at_zero(self) -> bool:
        """A margin may be kept by every pair, and what a loss of the user's own may be is not known here."""
        config = self.config.loss
        return config.name == "custom" or config.form in ("margin", "margin_mse")

    def saved(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {"total": self.total, "in_a_row": self.in_a_row}

    def go_on(self, saved: Mapping[str, int]) -> None:
        """Count on from a checkpoint; from nothing after one that has no counts."""
        self.total, self.in_a_row = saved.get("total", 0), saved.get("in_a_row", 0)

    def _fault(self, loss: float, units: float, skipped: bool) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if skipped:
            return "its update was skipped, since a gradient is not finite"
        if units == 0:
            return NO_ROW
        return "the loss is exactly 0" if loss == 0 and not self._fine_at_zero else None

    def _advice(self, fault: str) -> tuple[str, ...]:
        data = "python -m launcher check data ...   (rows whose documents are all alike, or alone, teach nothing)"
        if fault.endswith(NO_ROW):
            return ("python -m launcher check data ...   (names each row and why)",)
        if fault.endswith("exactly 0"):
            return (data, *(("precision=bf16 or precision=fp32",) if self.precision == "fp16" else ()))
        other = {"fp16": "precision=bf16 or precision=fp32   (fp16 ends at 65,504)", "bf16": "precision=fp32"}
        calmer = f"optim.lr={self.lr / 10:g}   (or a longer optim.warmup_ratio)"
        own = (
            [f"loss.function={self.config.loss.function}   (what it returns)"]
            if self.config.loss.name == "custom"
            else []
        )
        return (*own, *([other[self.precision]] if self.precision in other else []), calmer, data)


class GradientWatch:
    """Holds trained weights to having got a gradient in the first steps; made before the engine, which takes them away.

    Matrices only: a zero gradient of a bias or norm can be right. A LoRA A has none while its B is zero, so B is asked.
    """

    def __init__(self, scorer: Any, family: Family) -> None:
        self._family = family
        self._counts: dict[str, Tensor] = {}  # gradients of this rank that are not zero
        named = [(name, p) for name, p in trained(scorer) if ".lora_A." not in name]
        shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in named}
        self.waiting = {name for name, shape in shapes.items() if len(shape) > 1}
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._count, name))
            for name, p in named
            if name in self.waiting
        ]
        self._steps = 0

    def _count(self, name: str, parameter: Any) -> None:
        count = torch.count_nonzero(parameter.grad)
        self._counts[name] = self._counts[name] + count if name in self._counts else count

    def after_step(self, rank: Rank, sees: bool, loss: float) -> str | None:
        """Check a step; a warning or None. Raises TrainingError for weights that should have got a gradient.

        `sees`: this rank had images in it.

        Collective until nothing waits any more. A step without any gradient (no usable row, a loss of 0) tells nothing.
        """
        if not self.waiting:
            return None
        got = {name for name, count in self._counts.items() if count > 0}
        self._counts.clear()
        found = rank.gather((got, sees))
        got = set().union(*(names for names, _ in found))
        seen = any(images for _, images in found)
        self._steps += 1
        if not got and (loss == 0 or not math.isfinite(loss)):
            return None
        self.waiting -= got
        unreached = sorted(name for name in self.waiting if seen or self._part(name) not in SEEING_PARTS)
        if unreached:
            raise self._error(unreached)
        if self.waiting and self._steps < STEPS_WITHOUT_IMAGES:
            return None
        parts = sorted({self._part(name) for name in self.waiting})
        self.waiting = set()
        for hook in self._hooks:
            hook.remove()
        text = f"no image in {STEPS_WITHOUT_IMAGES} steps: {' and '.join(parts)}, which should train, learn nothing"
        return text if parts else None

    def _part(self, name: str) -> str:
        return part_of(name, self._family)

    def _error(self, names: Sequence[str]) -> TrainingError:
        problems = []
        for part in sorted({self._part(name) for name in names}):
            own = [name for name in names if self._part(name) == part]
            text = f"{len(own)} trained weights of {part} got no gradient in step {self._steps}, the first is {own[0]}"
            tries = (f"tune.{part}=frozen   (leaves that part as it is)", "memory.gradient_checkpointing=none")
            problems.append(Problem(text, tries=tries))
        return TrainingError(*problems, title="with this training")


def unseen_pixels(engine: Any, batches: Sequence[MicroBatch], rank: Rank) -> str | None:
    """A warning when no output of this step depends on its images; None when one does, or there is no image.

    Two forward passes of one micro-batch of each rank; collective. A loader or a processor that drops images leaves a
    loss that falls all the same, on what the words alone tell.
    """
    # Unnamed, so that no features are kept, nor taken from those kept; all of its images must have been decoded.
    shown = [replace(b, media={}) for b in batches if b.pixel_values is not None and all(b.media.values())]
    batch, pixels = (shown[0], shown[0].pixel_values) if shown else (batches[0], None)
    if not any(rank.gather(pixels is not None)):
        return None
    other = batch if not isinstance(pixels, Patches) else replace(batch, pixel_values=pixels.changed())
    engine.eval()
    with torch.no_grad():
        first, second = (engine(one.to(rank.device)) for one in (batch, other))
    # An answer before its image, or no answer at all, tells nothing: so it is a warning.
    if any(rank.gather(not torch.equal(first, second))):
        return None
    return "the images of the first step make no difference to what the model says of its rows: does it see them?"


def trained(scorer: Any) -> list[tuple[str, Any]]:
    """(name, parameter) of all that trains."""
    return [(name, parameter) for name, parameter in scorer.named_parameters() if parameter.requires_grad]


def digests(named: Iterable[tuple[str, Any]], dtype: torch.dtype) -> dict[str, int]:
    """Parameter -> the sum of its bits as whole numbers, in `dtype`: equal on every kind of device, and quick.

    Parameters that ZeRO-3 has partitioned are gathered: call it on all ranks.
    """
    import deepspeed

    found = {}
    for name, parameter in named:
        with deepspeed.zero.GatheredParameters([parameter]) if hasattr(parameter, "ds_id") else nullcontext():
            value = parameter.detach().to(dtype).contiguous()
            found[name] = int(value.view(BITS[value.element_size()]).sum(dtype=torch.int64))
    return found


def check_equal_start(rank: Rank, before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Trained weights are rank 0's on every rank, and those that the model was built with.

    `before` and `after`: digests of this rank from before and after DeepSpeed took the model. Collective.
    """
    found = rank.gather((before, after))
    first = found[0][0]
    for number, (_, theirs) in enumerate(found):
        changed = sorted(name for name in first if theirs.get(name) != first[name])
        if changed:
            text = f"{len(changed)} trained weights of rank {number} do not begin as rank 0 built them: {changed[0]}"
            tries = ("the same versions of torch, peft and deepspeed on every host (python -m launcher env)",)
            raise TrainingError(Problem(text, tries=tries), title="with this training")
