"""The same run on other numbers of GPUs: how long and at what cost, and the smallest number that it fits on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.errors import ConfigError
from launcher.estimates import Scale
from launcher.planning.auto import fastest
from launcher.planning.candidates import AUTO, OFFLOADED, Ask, Scales, Weighed, finished, sharded, token_sizes

COUNTS = (1, 2, 4, 8, 16)
MOST_GPUS = 64  # looked at when the smallest number is searched
HOUR_S = 3600


def side_by_side(ask: Ask, chosen: Weighed) -> tuple[Scale, ...]:
    """The run on 1 to 16 GPUs, everything that is auto chosen for each; a setting that needs several hosts is shown as
    plain stage 3 where there is one."""
    return tuple(
        _scale(ask, gpus, chosen if gpus == ask.world else _on(ask, gpus)) for gpus in sorted({*COUNTS, ask.world})
    )


def _on(ask: Ask, gpus: int) -> Weighed:
    there = ask.on(gpus)
    try:
        return fastest(there)
    except ConfigError:
        config = replace(ask.config, zero=replace(ask.config.zero, name="stage3", file="stage3.json", config=None))
        return fastest(replace(there, config=config, own=None))


def _scale(ask: Ask, gpus: int, one: Weighed) -> Scale:
    seconds = None if one.time is None else one.time.step_s
    hours = None if seconds is None or ask.steps_per_epoch is None else seconds * ask.steps_per_epoch / HOUR_S
    return Scale(
        gpus=gpus,
        zero=one.zero,
        fits=one.fits,
        gpu_bytes=one.memory.total,
        host_bytes=sum(one.memory.host.values()),
        step_s=seconds,
        epoch_hours=hours,
        epoch_gpu_hours=None if hours is None else gpus * hours,
    )


def smallest(ask: Ask) -> tuple[int, Weighed] | None:
    """The smallest number of GPUs that the run fits on with any sharding and every layer recomputed; None above
    MOST_GPUS. What is gathered does not shrink with more GPUs, so that some runs never fit."""
    low, high = 2, MOST_GPUS
    alone, best = most_frugal(ask.on(1)), most_frugal(ask.on(high))
    if alone is not None and alone.fits:
        return 1, alone
    if best is None or not best.fits:
        return None
    while low < high:  # from two on, which need buffers of NCCL, bytes never grow with more GPUs
        middle = (low + high) // 2
        one = most_frugal(ask.on(middle))
        if one is not None and one.fits:
            high, best = middle, one
        else:
            low = middle + 1
    return high, best


def most_frugal(ask: Ask, names: Sequence[str] = ()) -> Weighed | None:
    """Of the named settings (else those that zero=auto weighs) the first that fits with the smallest micro-batch and
    all layers recomputed, else the one that needs least. None where all are refused."""
    scales, layers = Scales(ask), ask.shape.layers
    tokens = min(token_sizes(ask))
    least: Weighed | None = None
    for setting, _ in finished(ask, names or sharded(ask)):
        one = scales.weigh(setting, tokens, layers)
        if one.fits:
            return scales.whole(one)
        if least is None or one.memory.total < least.memory.total:
            least = one
    return least and scales.whole(least)


def offloaded(ask: Ask) -> Weighed | None:
    """The first setting that fits once optimizer states, or weights too, are kept in main memory."""
    one = most_frugal(ask, OFFLOADED)
    return one if one is not None and one.fits else None


def relaxed(ask: Ask) -> Ask:
    """The same run with everything that decides its memory left to the planner."""
    config = ask.config
    config = replace(
        config,
        zero=replace(config.zero, name=AUTO, file=AUTO, config=None),
        memory=replace(config.memory, gradient_checkpointing=AUTO),
        batch=replace(config.batch, max_tokens=AUTO),
    )
    return replace(ask, config=config, own=None)
