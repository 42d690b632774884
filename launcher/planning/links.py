"""Bytes that ZeRO moves between GPUs and to main memory in a step, and what that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from launcher.families import trains_fully
from launcher.planning.models import lora_modules, parameter_counts, trainable_counts
from launcher.planning.passes import reaches_language
from launcher.planning.rates import Rates
from launcher.planning.setting import Setting

GB = 1e9
LATENCY_S = 30e-6  # of a collective within a host; each further host adds as much
ADAM_PER_S = 1e9  # assumed: parameters that the processors of a host update in a second
NVME_GBS = 5.0  # assumed: of a host's disks, reading and writing alike
STATE_BYTES = 12  # of a trained parameter in main memory or on disk: float32 master copy and two moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Seconds of what is moved, as if nothing overlapped."""

    gather_forward_s: float = 0.0  # network, a micro-step
    gather_backward_s: float = 0.0
    reduce_s: float = 0.0  # network, a micro-step
    reduce_step_s: float = 0.0  # network, once an optimizer step
    gather_step_s: float = 0.0
    first_gather_s: float = 0.0  # before which nothing can be computed
    host_micro_s: float = 0.0  # host link, a micro-step
    host_step_s: float = 0.0
    cpu_step_s: float = 0.0  # the optimizer on processors, and disks
    overlaps: bool = False  # gathers run beside computing


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Parameters by what ZeRO does with them."""

    forward: float  # gathered in the forward pass
    backward: float
    trained: float
    tensors: int  # that train
    gathers: tuple[int, int]  # collectives of the forward and the backward pass


def links(setting: Setting, sizes: Sizes, rates: Rates) -> Links:
    """Seconds of communication of a rank."""
    zero, world = setting.deepspeed["zero_optimization"], setting.world
    size = 4 if setting.precision == "fp32" else 2
    away = _away(setting, zero, sizes, rates, size)
    if world == 1:
        return away
    part = (world - 1) / world
    bus, latency = bus_gbs(setting.world, setting.slots, rates) * GB, _latency_s(setting)
    trained = size * sizes.trained * part / bus
    if setting.stage < 3:
        # Stage 2 divides gradients in every micro-step; stages 0 and 1 sum them up where they are, once a step.
        gather_s = trained if setting.stage else 0.0
        if setting.stage == 2:
            return replace(away, reduce_s=trained, gather_step_s=gather_s)
        return replace(away, reduce_step_s=2 * trained, gather_step_s=gather_s)
    forward = size * sizes.forward * part / bus + sizes.gathers[0] * latency
    backward = size * sizes.backward * part / bus + sizes.gathers[1] * latency
    sharers = int(zero.get("zero_hpz_partition_size") or 1)
    if sharers > 1:  # a second copy within each host
        near = bus_gbs(sharers, setting.slots, rates) * GB
        backward = size * sizes.backward * (sharers - 1) / sharers / near + sizes.gathers[1] * LATENCY_S
    return replace(
        away,
        gather_forward_s=forward,
        gather_backward_s=backward,
        reduce_s=trained,
        first_gather_s=size * min(zero.get("stage3_prefetch_bucket_size", 0), sizes.forward) * part / bus + latency,
        overlaps=bool(zero.get("overlap_comm", True)),
    )


def bus_gbs(world: int, slots: int, rates: Rates) -> float:
    """What a collective over so many ranks reaches: a ring passes the network of each host once."""
    return rates.link_gbs if world <= slots else min(rates.link_gbs, rates.network_gbs * slots)


def _latency_s(setting: Setting) -> float:
    hosts = -(-setting.world // setting.slots)
    return LATENCY_S * (1.0 + math.sqrt(hosts - 1))


def _away(setting: Setting, zero: dict[str, Any], sizes: Sizes, rates: Rates, size: int) -> Links:
    """What offloading moves: gradients down and weights up, states on disk, weights for each of their uses."""
    optimizer, weights = (_device(zero.get(f"offload_{what}")) for what in ("optimizer", "param"))
    link, world, slots = rates.host_gbs * GB, setting.world, min(setting.slots, setting.world)
    micro = step = processor = 0.0
    own = sizes.trained / world if setting.stage else sizes.trained
    if optimizer:
        micro += 4 * own / link  # gradients, in float32
        step += size * own / link
        processor += own * slots / ADAM_PER_S
        if optimizer == "nvme":
            processor += 2 * STATE_BYTES * own * slots / (NVME_GBS * GB)
    if weights:
        rate = NVME_GBS * GB / slots if weights == "nvme" else link
        micro += size * (sizes.forward + sizes.backward) / world / rate
    return Links(host_micro_s=micro, host_step_s=step, cpu_step_s=processor)


def _device(section: Any) -> str | None:
    found = (section or {}).get("device")
    return found if found in ("cpu", "nvme") else None


def sizes_of(setting: Setting, *, sees: bool) -> Sizes:
    """Parameters that are gathered and trained. In the backward pass a part is needed if gradients run through it.

    `sees`: whether there are pictures; without any the tower never runs.
    """
    shape, tune, task = setting.shape, setting.config.tune, setting.config.task
    counts = parameter_counts(shape)
    trained = sum(trainable_counts(shape, tune, task).values())
    tower, projector = tune.vision != "frozen", tune.vision != "frozen" or tune.projector != "frozen"
    head = counts["head"] or counts["embeddings"]
    runs = ("language", "embeddings", *(("vision", "projector") if sees else ()))
    forward = sum(counts[part] for part in runs)
    backward = counts["language"] * reaches_language(tune)
    backward += sees * (counts["vision"] * tower + counts["projector"] * projector)
    if task.name == "sft":
        forward, backward = forward + head, backward + head
    a_layer = 1 if setting.fused else len(shape.decoder(0)) + (2 if shape.experts else 0)  # fused: gathered whole
    v = shape.vision
    blocks, mergers = (v.depth * len(v.block), 2 * (1 + v.deepstack)) if v and sees else (0, 0)
    if sees and setting.fast_tower:  # whole
        blocks, mergers = 1, 0
    return Sizes(
        forward=forward,
        backward=backward,
        trained=trained,
        tensors=trained_tensors(setting),
        gathers=(
            shape.layers * a_layer + blocks + mergers + 1,
            shape.layers * a_layer * reaches_language(tune) + blocks * tower + mergers * projector,
        ),
    )


def trained_tensors(setting: Setting) -> int:
    """Tensors that the optimizer holds, about: each costs host time."""
    shape, tune = setting.shape, setting.config.tune
    found = 2 * len(lora_modules(shape, tune)) + (tune.head == "full")
    if trains_fully("language", tune):
        norms = 4 if shape.family.qk_norm else 2
        found += shape.layers * (len(shape.decoder(0)) + norms + (3 if shape.experts else 0)) + 2
    if shape.vision is not None and trains_fully("vision", tune):
        found += shape.vision.depth * (2 * len(shape.vision.block) + 4) + 3
    if shape.vision is not None and trains_fully("projector", tune):
        found += 6 * (1 + shape.vision.deepstack)
    return found
