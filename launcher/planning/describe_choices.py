"""The part of a plan's text that weighs: other settings and why each lost, other numbers of GPUs side by side."""

from __future__ import annotations

import math

from launcher.estimates import Choice, Scale
from launcher.planning import lines
from launcher.spec import RunPlan

BAR = 20  # characters of the longest
NONE = "-"


def choice_lines(plan: RunPlan) -> list[str]:
    """The chosen setting, then the runners-up; nothing where nothing was left to the planner."""
    if not plan.choices:
        return []
    head = ("zero", "recomputed", "max_tokens", "GiB", "a step", "")
    rows = [head, *(_choice(choice) for choice in plan.choices)]
    return ["Settings that were weighed, the chosen one first", *lines.table_with_text(rows, right=(1, 2, 3, 4))]


def _choice(choice: Choice) -> tuple[str, ...]:
    return (
        choice.zero,
        f"{choice.checkpointed_layers}",
        f"{choice.max_tokens:,}",
        lines.gib(choice.gpu_bytes),
        NONE if choice.step_s is None else lines.seconds(choice.step_s),
        choice.verdict,
    )


def scaling_lines(plan: RunPlan) -> list[str]:
    """The same run on other numbers of GPUs: hours of an epoch, GPU-hours, a bar for the hours."""
    if not plan.scaling:
        return []
    longest = max((s.epoch_hours for s in plan.scaling if s.fits and s.epoch_hours is not None), default=None)
    head = ("GPUs", "zero", "GiB a GPU", "a host", "a step", "hours an epoch", "GPU-hours", "a step")
    rows = [head, *(_scale(scale, longest, here=scale.gpus == plan.world_size) for scale in plan.scaling)]
    title = "The same run on other numbers of GPUs"
    if longest is None:
        title += " (hours: once the rows are counted)"
    return [title, *lines.table(rows, right=(0, 2, 3, 4, 5, 6))]


def _scale(scale: Scale, longest: float | None, *, here: bool) -> tuple[str, ...]:
    hours = scale.epoch_hours if scale.fits else None
    drawn = "#" * math.ceil(BAR * hours / longest) if hours is not None and longest else ""
    note = " ".join(filter(None, (drawn, "" if scale.fits else "does not fit", "<- this plan" if here else "")))
    return (
        f"{scale.gpus}",
        scale.zero,
        lines.gib(scale.gpu_bytes),
        lines.gib(scale.host_bytes),
        NONE if scale.step_s is None or not scale.fits else lines.seconds(scale.step_s),
        _digits(hours),
        _digits(scale.epoch_gpu_hours if scale.fits else None),
        note,
    )


def _digits(value: float | None) -> str:
    return NONE if value is None else lines.digits(value)
