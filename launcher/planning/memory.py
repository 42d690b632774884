"""Bytes of one GPU (or CPU rank) by part: states of ZeRO and activations put together, moment by moment.

`states` and `activations` count tensors; what torch's allocator and the driver take on top is fitted, below.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.estimates import CONTEXT, FRAGMENTS, Load, MemoryEstimate
from launcher.planning.activations import Activations, activations
from launcher.planning.environ import ALLOCATOR, EXPANDABLE
from launcher.planning.gpus import GIB
from launcher.planning.groups import groups
from launcher.planning.hostram import FEATURES, RANK_BYTES, disk_parts, host_parts
from launcher.planning.models import parameter_counts, trainable_counts
from launcher.planning.setting import Setting
from launcher.planning.states import Parts, States, plus, states
from launcher.spec import RunPlan

MIB = 2**20
TABLES = 128 * MIB  # at most: what a frozen vision tower keeps of pictures' sizes (launcher.training.vision_tables)
GROWS = "working memory"  # launcher.estimates.grows_with_tokens knows this name, and "activations"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """What is not counted tensor by tensor."""

    context: int  # CUDA context, libraries and kernels
    stage3: int  # the same on top under ZeRO-3, which computes in streams of its own
    nccl: int  # buffers of the process groups, with more than one rank
    cublas: int  # workspaces of both threads' handles, which the allocator holds
    rounding: int  # what the allocator holds and cannot use: the ends of its pools and streams
    share: float  # and of the allocated bytes
    share_fixed_segments: float  # the same without expandable segments
    holes: float  # of weights that train, where flattening has left holes that a large buffer does not fit in
    most_holes: int


# Fitted on the set "fit" of tests/bench/memory.py: one H200, torch 2.11 (CUDA 13), 12 runs (tests/bench/RESULTS.md).
# `nccl` has not been measured: no machine with two GPUs was there.
GPU = Overheads(
    context=1320 * MIB,
    stage3=390 * MIB,
    nccl=400 * MIB,
    cublas=64 * MIB,
    rounding=560 * MIB,
    share=0.002,
    share_fixed_segments=0.012,
    holes=0.25,
    most_holes=2048 * MIB,
)


def estimate(setting: Setting, load: Load) -> MemoryEstimate:
    """Bytes by part at the fullest moment of a run whose fullest micro-batch is `load`."""
    found = moments(setting, load)
    moment = max(found, key=lambda name: sum(found[name].values()))
    held, config, shape = states(setting), setting.config, setting.shape
    disk = disk_parts(
        config, setting.precision, parameter_counts(shape), trainable_counts(shape, config.tune, config.task)
    )
    swapped = {"offloaded to NVMe": held.swapped * setting.slots} if held.swapped else {}
    return MemoryEstimate(
        gpu=found[moment], moment=moment, host=host_parts(setting, held, load), disk={**disk, **swapped}
    )


def moments(setting: Setting, load: Load) -> dict[str, Parts]:
    """Moment of training (loading, forward, backward, optimizer) -> bytes by part."""
    held, found = states(setting), activations(setting, load)
    kept = {f"activations: {part}": size for part, size in found.kept.items()}
    stays = {"tables of pictures": TABLES} if setting.fast_tower and load.patches else {}
    if setting.device == "cpu":  # what is offloaded stays where it is
        stays |= {f"offloaded {part}": size for part, size in held.host.items()}
    bare = {
        "loading": held.loading,
        "forward": plus(held.forward, kept, {GROWS: found.forward}, stays),
        "backward": plus(_backward(held, found, kept, _waiting(setting)), stays),
        "optimizer": plus(held.optimizer, stays),
    }
    return {name: _with_overheads(setting, parts) for name, parts in bare.items()}


def _waiting(setting: Setting) -> int:
    """Bytes of gradients that a fused layer gives at once, and that wait while one of them fills a bucket."""
    if not setting.fused or setting.config.tune.language != "full":
        return 0
    layer = groups(setting.shape, setting.config.tune)[0]
    after = sum(layer[name].inner * layer[name].outer for name in ("out", "gate_up", "down"))
    return (4 if setting.precision == "fp32" else 2) * after


def _backward(held: States, found: Activations, kept: Parts, waiting: int) -> Parts:
    """The fuller of its first layer, the first reduction of gradients, and its end.

    When a bucket has been filled, the activations of the layers that filled it are gone.
    """
    working, alive = found.backward, sum(kept.values())
    left = int(held.flushed * alive)
    first = plus(held.backward, kept, {GROWS: max(working, held.flush + waiting - left)})
    ending = held.ending
    return first if sum(first.values()) >= sum(ending.values()) else ending


def _with_overheads(setting: Setting, parts: Parts) -> Parts:
    parts = {name: size for name, size in parts.items() if size}
    if setting.device == "cpu":
        kept = int(setting.config.memory.vision_cache_gib * GIB)
        return {**parts, **({FEATURES: kept} if kept else {}), CONTEXT: RANK_BYTES["cpu"]}
    parts["cuBLAS workspace"] = GPU.cublas
    share = GPU.share if _expandable(setting) else GPU.share_fixed_segments
    holes = min(GPU.most_holes, int(GPU.holes * parts.get("trained weights", 0)))
    fragments = int(share * sum(parts.values())) + GPU.rounding + holes
    context = GPU.context + (GPU.stage3 if setting.stage == 3 else 0) + (GPU.nccl if setting.world > 1 else 0)
    return {**parts, FRAGMENTS: fragments, CONTEXT: context}


def _expandable(setting: Setting) -> bool:
    """Whether the allocator can grow its segments: the launcher's setting, unless env.set says otherwise."""
    own = [str(setting.config.env.set[name]) for name in ALLOCATOR if setting.config.env.set.get(name) is not None]
    return not own or EXPANDABLE in own[0]


def disk_bytes(plan: RunPlan) -> int:
    """What a run writes, about: the checkpoints it keeps, the one written beside them, and the export."""
    return sum(disk_parts(plan.config, plan.precision, plan.parameters, plan.trainable).values())
