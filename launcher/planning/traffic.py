"""Bytes that the elementwise work of a load moves through a GPU's memory: kernels of eager PyTorch, one after another.

Counted from what transformers' Qwen modules call. Each kernel reads its inputs and writes its output once; nothing is
fused, and nothing stays in a cache, since tensors of a micro-batch are larger than one. Matrix products and attention
kernels are no part of it. Bytes are per value in 16 bits; work that is done in float32 says so by its size.
"""

from __future__ import annotations

import functools

from launcher.estimates import Load
from launcher.planning import fitted, fused_work
from launcher.planning.models import linear_modules, lora_modules
from launcher.planning.passes import Passes, reaches_language
from launcher.planning.setting import Setting
from launcher.planning.shapes import Shape
from launcher.spec import TuneConfig

# (forward, backward) bytes per value.
NORM = (36, 76)  # RMSNorm in float32: to float32, square, mean, scale, back, times weight
ROTARY = (18, 30)  # of a query or key: two products, two halves exchanged and joined, a sum
GATED = (10, 18)  # SwiGLU, per intermediate value
RESIDUAL = (12, 12)  # two sums a layer
FAN_OUT = (0, 18)  # gradients of q, k and v, of gate and up, added up where they left one input
ADAPTER_IN, ADAPTER_OUT = (2, 10), (12, 8)  # LoRA, per value of a module's input and output
MIXING = (4, 4)  # the attention's output, laid out for o_proj
GATHER = (8, 4)  # K and V of a shared prefix, per value of one of them
NORM_WEIGHT = (0, 8)  # the gradient of a norm's weight
LAYER_NORM = (4, 8)  # one kernel
GELU = (4, 6)
VISION_ROTARY = (52, 90)  # in float32
# launcher.training.vision_tower, per hidden value: sums with norms, twice, and queries and keys turned in place.
FAST_BLOCK, SILU_TIMES = 2 * 8 + 2 * 4, 6
EXPERT = (20, 20)  # a token's copy for each expert that it takes, there and back, per hidden value
# Linear attention in plain PyTorch, in float32, per value of its keys and values: chosen for one run of Qwen3.5-4B.
DELTA = (700, 1400)
DORA = (100, 50)  # per adapted weight and micro-batch: lengths of the rows of the whole matrix
LOGITS = (2, 4)  # per logit of an answer: read for softmax's sums; read and replaced by its slope


def traffic(setting: Setting, load: Load) -> dict[str, Passes]:
    """Bytes by part: language, adapters, vision, head."""
    scale = 1.0 if setting.precision != "fp32" else 2.0
    parts = {
        "language": _language(setting, load),
        "adapters": _adapters(setting, load),
        "vision": _vision(setting, load),
        "head": _head(setting, load),
    }
    return {name: passes.times(scale) for name, passes in parts.items() if passes.total}


def _passes(forward: float, backward: float, *, reached: bool, recomputed: float) -> Passes:
    """`recomputed` is the share of the forward pass that is done again."""
    if not reached:
        return Passes(forward=forward)
    return Passes(forward=forward, backward=backward, again=forward * recomputed)


def _language(setting: Setting, load: Load) -> Passes:
    if setting.fused:
        return fused_work.traffic(setting, load, fitted.FUSED_ADDING)
    shape = setting.shape
    h, q, kv = shape.hidden, shape.q_width, shape.kv_width
    attending = len(shape.attending)
    deltas = 0 if shape.delta is None else (shape.layers - attending) * (2 * shape.delta.keys + shape.delta.values)
    experts = 0 if shape.experts is None else shape.layers * shape.experts.active * h
    trains = setting.config.tune.language == "full"

    def bytes_of(way: int) -> float:
        norms = shape.layers * 2 * h + (attending * (q + kv) if shape.family.qk_norm else 0)
        a_token = norms * (NORM[way] + trains * NORM_WEIGHT[way])
        a_token += attending * ((q + kv) * ROTARY[way] + q * MIXING[way])
        a_token += shape.layers * (shape.mlp_width * GATED[way] + h * (RESIDUAL[way] + FAN_OUT[way]))
        a_token += deltas * DELTA[way] + experts * EXPERT[way]
        return a_token * load.tokens + attending * kv * load.key_rows * GATHER[way]

    return _passes(
        bytes_of(0),
        bytes_of(1),
        reached=reaches_language(setting.config.tune),
        recomputed=setting.recomputed,
    )


def _adapters(setting: Setting, load: Load) -> Passes:
    shape, found = setting.shape, Passes()
    merge = shape.vision.merge**2 if shape.vision else 1
    rows = {"language": load.tokens, "vision": load.patches, "projector": load.patches / merge}
    again = {"language": setting.recomputed, "vision": float(setting.checkpointed_layers > 0)}
    if setting.fused:
        found += fused_work.adapters_traffic(setting, load)
    for part, (*each, adapted) in _adapters_a_row(shape, setting.config.tune).items():
        if part == "language" and setting.fused:
            continue
        forward, backward = (rows[part] * each[way] for way in (0, 1))
        if setting.config.tune.use_dora:
            forward, backward = forward + adapted * DORA[0], backward + adapted * DORA[1]
        found += _passes(forward, backward, reached=True, recomputed=again.get(part, 0.0))
    return found


@functools.lru_cache(maxsize=256)
def _adapters_a_row(shape: Shape, tune: TuneConfig) -> dict[str, tuple[float, float, float]]:
    """Part -> bytes of one of its rows in all of its adapters, forward and backward; weights beside adapters."""
    sizes, found = linear_modules(shape), dict[str, tuple[float, float, float]]()
    for name in lora_modules(shape, tune):
        (inner, outer), part = sizes[name], shape.family.part_of(name)
        *before, adapted = found.get(part, (0.0, 0.0, 0.0))
        forward, backward = (before[w] + inner * ADAPTER_IN[w] + outer * ADAPTER_OUT[w] for w in (0, 1))
        found[part] = forward, backward, adapted + inner * outer
    return found


def _vision(setting: Setting, load: Load) -> Passes:
    v = setting.shape.vision
    if v is None or not load.patches:
        return Passes()
    if setting.fast_tower and setting.fused:
        inner = v.intermediate * SILU_TIMES if v.kind == "qwen2_5" else 0
        return Passes(forward=load.patches * v.depth * (v.hidden * FAST_BLOCK + inner))
    inside, norm = (GATED, NORM) if v.kind == "qwen2_5" else (GELU, LAYER_NORM)

    def bytes_of(way: int) -> float:
        block = v.hidden * (2 * norm[way] + RESIDUAL[way] + 2 * VISION_ROTARY[way]) + v.intermediate * inside[way]
        return load.patches * v.depth * block

    recomputed = float(setting.checkpointed_layers > 0)
    return _passes(
        bytes_of(0), bytes_of(1), reached=setting.config.tune.vision != "frozen", recomputed=recomputed
    )  # fmt: skip


def _head(setting: Setting, load: Load) -> Passes:
    if setting.config.task.name != "sft":
        return Passes()
    logits = load.answers * setting.shape.vocab
    return Passes(forward=LOGITS[0] * logits, backward=LOGITS[1] * logits)
