"""Bytes of one GPU that the engine holds whatever a micro-batch is: weights, gradients, optimizer, buffers of ZeRO.

Read off DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py,
partitioned_param_coordinator.py, runtime/bf16_optimizer.py, engine.py) and held to the tensors that real engines keep
in tests/test_memory.py. A step is taken to have several micro-batches, so that gradients lie beside a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from launcher.arithmetic import MOST_WHOLE
from launcher.planning.groups import groups
from launcher.planning.setting import Setting
from launcher.planning.tensors import Tensors, tensors

Parts = dict[str, int]  # part -> bytes

# bitsandbytes: a float32 constant for each 64 weights of 4 bits; double_quant stores 256 of them in a byte each and
# one more float32. Moments of 8 bits have a float32 for each 256 values.
FOUR_BIT, FOUR_BIT_TWICE = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)
MOMENTS_8BIT = 2 * (1 + 4 / 256)
# DeepSpeed's own values of what a configuration leaves out (runtime/zero/config.py); the planner writes the others.
REDUCE_BUCKET, PREFETCH_BUCKET, MAX_LIVE, PERSISTENT, SUB_GROUP = 500_000_000, 50_000_000, 10**9, 100_000, 10**9
ALLREDUCE = 500_000_000  # elements that stage 0 copies together to add them up (MEMORY_OPT_ALLREDUCE_SIZE)
NORM_BYTES = 8  # a value: DeepSpeed squares gradients in float64, one tensor at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Bytes of one rank by part at each moment, activations left out, and of its host."""

    loading: Parts  # at the fullest moment before the first step
    forward: Parts
    backward: Parts  # beside all that the forward pass keeps
    flush: int  # on top of `backward`, when a bucket of gradients is reduced
    flushed: float  # share of the trained weights whose gradients are known by then, 0 to 1
    ending: Parts  # when the backward pass has reached the first layer, and nothing of the forward pass is left
    optimizer: Parts
    host: Parts  # main memory of this rank's host, this rank's share
    swapped: int  # bytes that this rank keeps in files


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What the parts follow from: elements, bytes a value, and where things lie."""

    stage: int
    world: int
    weight: int  # bytes of a weight
    summed: int  # of a gradient while micro-batches are added up
    master: int  # of a master weight; 0: none
    moments: float  # of both moments
    trained: int  # elements
    frozen_bytes: int
    beside_bytes: int  # copies of adapters that lie with frozen weights, and what is between them
    largest: int  # elements of the largest trained tensor
    late: int  # of the largest one that the backward pass reaches last: the embeddings
    leaf: int  # of a layer that ZeRO-3 gathers whole, 0 where it gathers its parameters one after another
    tower: int  # likewise, of the vision tower
    all: tuple[Tensors, ...]
    zero: dict[str, Any]
    immediate: bool
    fp16: bool

    def key(self, name: str, default: int) -> int:
        """A whole number of the ZeRO section."""
        value = self.zero.get(name)
        return default if value is None else int(value)

    def offloads(self, what: str) -> str | None:
        """cpu or nvme where `offload_optimizer` or `offload_param` sends something there."""
        section = self.zero.get(f"offload_{what}")
        device = section.get("device") if isinstance(section, dict) else None
        return None if device in (None, "none") else str(device)

    def share(self, elements: float, from_stage: int) -> int:
        """Elements of one rank's part, where they are sharded from a stage on."""
        return math.ceil(elements / self.world) if self.stage >= from_stage else int(elements)


def numbers(setting: Setting) -> Numbers:
    """The numbers of a setting."""
    config, deepspeed = setting.config, setting.deepspeed
    zero, stage = deepspeed["zero_optimization"], setting.stage
    bf16 = deepspeed.get("bf16") or {}
    half = bool(bf16.get("enabled")) or bool((deepspeed.get("fp16") or {}).get("enabled"))
    weight = 2 if half else 4
    asked = (deepspeed.get("data_types") or {}).get("grad_accum_dtype")
    summed = weight if asked is None or stage == 0 else 4 if asked == "fp32" else 2
    small_master = bool(bf16.get("bf16_master_weights_and_grads"))
    moments: float = 4 if bf16.get("bf16_optimizer_states") else 8
    every = tensors(setting.shape, config.tune, config.task.name, len(config.task.classes))
    trained = [t for t in every if t.trained]
    each = FOUR_BIT_TWICE if config.tune.double_quant else FOUR_BIT
    return Numbers(
        stage=stage,
        world=setting.world,
        weight=weight,
        summed=summed,
        master=0 if stage == 0 else 2 if small_master else 4,
        moments=MOMENTS_8BIT if config.optim.name == "adamw8bit" else moments,
        trained=sum(t.elements for t in trained),
        frozen_bytes=int(sum(t.elements * (each if t.four_bit else weight) for t in every if not t.trained)),
        beside_bytes=weight * _beside(setting),
        largest=max((t.size for t in trained), default=0),
        late=max((t.size for t in trained if t.part == "embeddings"), default=0),
        leaf=sum(g.inner * g.outer for g in groups(setting.shape, config.tune)[0].values()) if setting.fused else 0,
        tower=sum(t.elements for t in every if t.part in ("vision", "projector")) if setting.fast_tower else 0,
        all=every,
        zero=zero,
        immediate=bool(bf16.get("immediate_grad_update")),
        fp16=bool((deepspeed.get("fp16") or {}).get("enabled")),
    )


def states(setting: Setting) -> States:
    """The states of a setting; the same for every micro-batch."""
    n = numbers(setting)
    return {0: _plain, 1: _stage1, 2: _stage2, 3: _stage3}[n.stage](n, setting)


def _beside(setting: Setting) -> int:
    """Numbers beside frozen weights, for products that take adapters along (launcher.training.fused.projections)."""
    if not setting.together:
        return 0
    return sum(group.beside for layer in groups(setting.shape, setting.config.tune) for group in layer.values())


def _weights(n: Numbers) -> Parts:
    return {"frozen weights": n.frozen_bytes + n.beside_bytes, "trained weights": n.weight * n.trained}


def _optimizer(n: Numbers) -> Parts:
    own = n.share(n.trained, 1)
    if n.offloads("optimizer"):
        return {}
    return {"master weights": n.master * own, "optimizer moments": int(n.moments * own)}


def plus(*several: Parts) -> Parts:
    """Parts added up."""
    total: Parts = {}
    for parts in several:
        for name, size in parts.items():
            total[name] = total.get(name, 0) + size
    return total


def _built(setting: Setting, n: Numbers) -> int:
    """Bytes of weights while the model is built on the device: random ones whole before any is quantized or sharded,
    those of a large model a module at a time (launcher.training.layerwise)."""
    if setting.config.model.weights != "random":
        return sum(_weights(n).values())
    quantized = max((t.size for t in n.all if t.four_bit), default=0)
    elements = sum(t.elements for t in n.all)
    if elements <= MOST_WHOLE or quantized:
        return n.weight * (elements + quantized)
    if n.stage < 3:
        return sum(_weights(n).values())
    shards = 0 if n.offloads("param") else _shards(n, trained=False) + _shards(n, trained=True)
    return shards + n.weight * max(t.size for t in n.all)


def _plain(n: Numbers, setting: Setting) -> States:
    """Stage 0: torch's optimizer over whole weights; gradients are copied together to be added up."""
    kept = plus(_weights(n), _optimizer(n))
    summed = plus(kept, {"gradients": n.summed * n.trained})
    copied = min(n.trained, ALLREDUCE + n.largest)
    return States(
        loading={"weights while loading": _built(setting, n)},
        forward=summed,
        backward=summed,
        flush=0,
        flushed=1.0,
        ending=summed,
        optimizer=plus(summed, {"optimizer step": n.weight * copied}),
        host={},
        swapped=0,
    )


def _below3(n: Numbers, setting: Setting, last: int = 0) -> Parts:
    """The fullest moment before the first step: the trained weights are copied into one buffer, then master weights
    and, for a moment, zeros as their gradients; `last`: bytes that the engine keeps in the end beside the weights."""
    own = n.share(n.trained, 1)
    device = 0 if n.offloads("optimizer") else own
    moments = [
        _built(setting, n),
        sum(_weights(n).values()) + n.weight * n.trained,
        sum(_weights(n).values()) + n.master * device + max(last, n.master * device),
    ]
    return {"weights while loading": max(moments)}


def _stage1(n: Numbers, setting: Setting) -> States:
    if n.weight == 2 and n.summed == 4 and not n.fp16 and not n.offloads("optimizer"):
        return _bf16_stage1(n, setting)
    own, bucket = n.share(n.trained, 1), n.key("reduce_bucket_size", REDUCE_BUCKET)
    kept = plus(_weights(n), _optimizer(n))
    size = max(n.summed, n.weight)
    summed = plus(kept, {"gradients": size * n.trained, "buckets": size * bucket})
    # All are reduced in the step, into this rank's own part; what was reduced is gone by then.
    copies = size * own
    return States(
        loading=_below3(n, setting),
        forward=summed,
        backward=summed,
        flush=0,
        flushed=1.0,
        ending=plus(summed, {"gradients": n.weight * n.largest if n.summed != n.weight else 0}),
        optimizer=plus(summed, {"optimizer step": max(copies, NORM_BYTES * min(n.largest, own))}),
        host=_offloaded(n),
        swapped=0,
    )


def _bf16_stage1(n: Numbers, setting: Setting) -> States:
    """DeepSpeed's BF16_Optimizer: float32 sums of every gradient, and those of the backward pass beside them until the
    step; a copy in bf16 is what ranks add up."""
    sums = n.summed * n.trained
    kept = plus(_weights(n), _optimizer(n), {"gradients": sums})
    passing = 0 if n.immediate else n.weight * n.trained
    summed = plus(kept, {"gradients": passing})
    return States(
        loading=_below3(n, setting, last=sums),
        forward=summed,
        backward=plus(kept, {"gradients": passing}),
        flush=0,
        flushed=1.0,
        ending=plus(summed, {"gradients": (n.summed + n.weight * n.immediate) * n.largest}),
        optimizer=plus(summed, {"optimizer step": n.weight * n.trained}),
        host={},
        swapped=0,
    )


def _stage2(n: Numbers, setting: Setting) -> States:
    own, bucket = n.share(n.trained, 1), n.key("reduce_bucket_size", REDUCE_BUCKET)
    double = 2 if n.zero.get("overlap_comm") else 1
    kept = plus(_weights(n), _optimizer(n))
    offload = n.offloads("optimizer") is not None
    compact = n.summed == 4 and n.weight == 2  # sums lie in one buffer, reduced values are added to it
    sums = n.summed * own if compact else n.weight * own
    if offload:
        sums = n.summed * own if compact else 0
        kept = plus(kept, {"buckets": n.weight * n.largest})  # what travels to the host goes through it
    forward = plus(kept, {"gradients": sums})
    # A micro-batch's own reduced gradients, where they are not added to the sums at once.
    backward = plus(forward, {"gradients": 0 if compact else n.weight * own, "buckets": n.weight * bucket * double})
    filled = min(bucket, n.trained)
    flush = n.weight * filled + (n.summed * min(n.largest, bucket) if compact else 0)
    last = {"gradients": 2 * n.weight * n.late + (n.summed * min(n.late, own) if compact else 0)}
    ending = plus(backward, last if n.late > bucket else {"buckets": flush})
    copied = 0 if compact else n.master * own
    step = max(0 if offload else copied, NORM_BYTES * min(n.largest, own))
    return States(
        loading=_below3(n, setting),
        forward=forward,
        backward=backward,
        flush=flush,
        flushed=filled / max(n.trained, 1),
        ending=ending,
        optimizer=plus(forward, {"optimizer step": step}),
        host=_offloaded(n),
        swapped=0,
    )


def _stage3(n: Numbers, setting: Setting) -> States:
    bucket, offload = n.key("reduce_bucket_size", REDUCE_BUCKET), n.offloads("optimizer")
    here = {"frozen weights": _shards(n, trained=False), "trained weights": _shards(n, trained=True)}
    if n.offloads("param"):
        here = dict.fromkeys(here, 0)
    own = _own(n)
    gathered, copy = _gathered(n), _copy_on_host(n)
    sums = 0 if offload else n.summed * own
    kept = plus(here, {} if offload else {"master weights": n.master * own, "optimizer moments": int(n.moments * own)})
    kept = plus(kept, {"gradients": sums, "buckets": n.weight * bucket, "copy of weights on the host": copy})
    passes = plus(kept, {"gathered weights": gathered})
    filled = min(bucket, n.trained)
    flush = n.weight * filled + (n.summed * math.ceil(filled / n.world) if n.summed != n.weight else 0)
    last = n.weight * n.late + (n.summed * math.ceil(n.late / n.world) if n.summed != n.weight else 0)
    sub = min(own, n.key("sub_group_size", SUB_GROUP) + math.ceil(n.largest / n.world))
    step = 0 if offload else max(n.summed * sub, NORM_BYTES * min(math.ceil(n.largest / n.world), own))
    if n.fp16 and not offload:  # a look for infinities over all sums at once
        step = max(step, (n.summed + 1) * own)
    first = [
        _built(setting, n) if setting.config.model.weights == "random" else sum(here.values()) + gathered,
        sum(here.values()) + (0 if offload else n.master * (own + sub)),
        sum(kept.values()) - (0 if offload else int(n.moments * own)) - copy,
    ]
    return States(
        loading={"weights while loading": max(first)},
        forward=passes,
        backward=passes,
        flush=flush,
        flushed=filled / max(n.trained, 1),
        ending=plus(passes, {"gradients": last if n.late > bucket else flush}),
        optimizer=plus(kept, {"gathered weights": _persistent(n), "optimizer step": step}),
        host=_offloaded(n),
        swapped=_swapped(n),
    )


def _shards(n: Numbers, *, trained: bool) -> int:
    """Bytes of one rank's weights under stage 3: each parameter is cut up by itself, and padded."""
    return n.weight * sum(
        t.count * math.ceil(t.size / n.world) if t.size else math.ceil(t.count / n.world)
        for t in n.all
        if t.trained == trained
    )


def _own(n: Numbers) -> int:
    return _shards(n, trained=True) // n.weight


def _small(n: Numbers) -> Iterable[Tensors]:
    threshold = n.key("stage3_param_persistence_threshold", PERSISTENT)
    return (t for t in n.all if t.size <= threshold)


def _copies(n: Numbers) -> bool:
    """Whether gathering makes a copy: a single rank looks at its own weights in place."""
    return n.world > 1 or n.offloads("param") is not None


def _persistent(n: Numbers) -> int:
    """Bytes of the small parameters that stay whole once they were gathered."""
    return n.weight * sum(t.elements for t in _small(n)) if _copies(n) else 0


def _gathered(n: Numbers) -> int:
    """Bytes of whole weights during a pass.

    Each module that is reached fetches another bucket ahead, until stage3_max_live_parameters are there: that many
    are, whatever the size of the bucket. A bucket being handed out lies there twice.
    """
    if not _copies(n):
        return 0
    large = [t for t in n.all if t.size > n.key("stage3_param_persistence_threshold", PERSISTENT)]
    total = sum(t.elements for t in large)
    biggest = max((t.size for t in large if t.part not in ("embeddings", "head")), default=0)
    biggest = max(biggest, n.leaf)
    ahead = n.key("stage3_prefetch_bucket_size", PREFETCH_BUCKET)
    live = n.key("stage3_max_live_parameters", MAX_LIVE) if ahead else biggest
    live = max(live, n.leaf, n.tower, max((t.size for t in large), default=0))
    return n.weight * (min(total, live + biggest) + min(total, ahead)) + _persistent(n)


def _copy_on_host(n: Numbers) -> int:
    """hpZ: one more copy of the weights, sharded over the ranks of a host."""
    sharers = n.key("zero_hpz_partition_size", 1)
    return n.weight * sum(t.elements for t in n.all) // sharers if sharers > 1 else 0


def _offloaded(n: Numbers) -> Parts:
    """Main memory of one rank's offloaded states."""
    parts: Parts = {}
    own = _own(n) if n.stage == 3 else n.share(n.trained, 1)
    to = n.offloads("optimizer")
    if to == "cpu":
        # Gradients twice: summed as they arrive, and those that the optimizer reads.
        again = n.summed if n.stage == 3 else n.weight
        parts["optimizer states"] = int((n.master + n.moments + n.master + again) * own)
        parts["optimizer states"] += n.weight * n.largest if n.stage < 3 else 0
    elif to == "nvme":
        section = n.zero["offload_optimizer"]
        largest = min(own, n.key("sub_group_size", SUB_GROUP))
        parts["buffers for files"] = int(section.get("buffer_count", 4)) * n.master * largest
        parts["optimizer states"] = n.summed * own
    where = n.offloads("param")
    if where == "cpu":
        parts["weights"] = _shards(n, trained=True) + _shards(n, trained=False)
    elif where == "nvme":
        section = n.zero["offload_param"]
        size = int(section.get("buffer_count", 5)) * int(section.get("buffer_size", 10**8))
        parts["buffers for files"] = parts.get("buffers for files", 0) + n.weight * size
    return parts


def _swapped(n: Numbers) -> int:
    """Bytes of one rank's files: master weights, both moments and gradients; weights."""
    own = _own(n)
    states = int((n.master + n.moments + n.master) * own) if n.offloads("optimizer") == "nvme" else 0
    weights = _shards(n, trained=True) + _shards(n, trained=False) if n.offloads("param") == "nvme" else 0
    return states + weights
