"""FLOPs of decoder layers that the fused functions compute, and bytes through a GPU's memory (launcher.training.fused).

The last layer's second half is computed for the rows that the head reads. Bytes are counted by each kernel's results
and arguments; per value in 16 bits.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.arithmetic import gathers_keys
from launcher.estimates import Load
from launcher.kernels import INLINE_RANKS
from launcher.planning.groups import Group, groups
from launcher.planning.passes import Passes, reaches_input, reaches_language
from launcher.planning.setting import Setting
from launcher.planning.shapes import Shape
from launcher.spec import TuneConfig

# Bytes per value of each kernel: what it reads and writes.
RMS_NORM, ADD_NORM, ADD, NORM_BACKWARD = 4, 8, 6, 8  # of the hidden size
SWIGLU, SWIGLU_BACKWARD = 6, 12  # of the MLP's inner size: two halves read, one written; half of it again, and both
ROTATE, ROTATE_BACKWARD = 4, 6  # of queries and keys; values pass through the latter (4)
NORM_GRADIENT = 4  # of norms that train: two values read
PRODUCT_ADDED = 4  # a product of low rank added to what is there
# Per key or value of a prefix that is copied: the copy, both ways; its gradients' sum. Per query of a second call.
COPY, SUM, SECOND_CALL = 4, 4, (12, 18)


Named = tuple[tuple[str, Group], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Decoder layers that are alike."""

    groups: Named
    last: bool  # half of it is computed for few rows
    again: bool  # they are computed again in the backward pass
    entrance: bool  # nothing wants the gradient of its input


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layers:
    """So many layers of a kind, and the rows that both halves are computed for, of all of them together."""

    kind: _Kind
    before: float
    after: float

    def groups(self) -> Iterator[tuple[Group, float, bool]]:
        """(group, its rows, whether nothing wants the gradient of its input)."""
        for name, group in self.kind.groups:
            first = name == "qkv"
            yield group, self.before if first else self.after, self.kind.entrance and first


def language(setting: Setting, load: Load) -> Passes:
    """FLOPs of the weights' products."""
    tune, found = setting.config.tune, Passes()
    trains = tune.language == "full"
    for layers in _layers(setting, load):
        for group, rows, entrance in layers.groups():
            forward = 2.0 * group.inner * group.outer * rows
            found += _passes(setting, layers, forward, forward * ((not entrance) + trains))
    return found


def adapters(setting: Setting, load: Load) -> Passes:
    """FLOPs of the adapters' products: joined, padded, and inside larger products or kernels."""
    found = Passes()
    for layers in _layers(setting, load):
        for group, rows, entrance in layers.groups():
            forward = 2.0 * group.rank * (group.inner + group.outer) * rows
            lacking = 2.0 * group.rank * group.inner * rows * entrance
            found += _passes(setting, layers, forward, 2 * forward - lacking)
    return found


def adapters_traffic(setting: Setting, load: Load) -> Passes:
    """Bytes of the thin products: each reads its wide side once. Where weights do not lie together with adapters, what
    these add is a pass of its own in the backward pass."""
    found, apart = Passes(), not setting.together
    for layers in _layers(setting, load):
        for group, rows, entrance in layers.groups():
            if not group.rank:
                continue
            forward = 2.0 * group.inner
            backward = 2.0 * (2 * group.outer + group.inner)
            if apart and group.rank > INLINE_RANKS:
                forward += PRODUCT_ADDED * group.outer
            if apart and not entrance:
                backward += PRODUCT_ADDED * group.inner
            found += _passes(setting, layers, forward * rows, backward * rows)
    return found


def traffic(setting: Setting, load: Load, slower: float) -> Passes:
    """Bytes of what lies between products; `slower`: kernels that add adapters, as so many more."""
    found = Passes()
    for layers in _layers(setting, load):
        found += _passes(setting, layers, *_layer_traffic(setting, layers, slower))
    return found + _prefixes(setting, load)


def _layer_traffic(setting: Setting, layers: _Layers, slower: float) -> tuple[float, float]:
    """Bytes of both passes."""
    shape, trains = setting.shape, setting.config.tune.language == "full"
    h, f, q, kv = shape.hidden, shape.intermediate, shape.q_width, shape.kv_width
    adds = {name: _adds(setting, group) for name, group in layers.kind.groups}
    rotated, gated = (slower if adds[name] else 1.0 for name in ("qkv", "gate_up"))
    adds_in_product = setting.together and dict(layers.kind.groups)["out"].rank > 0  # attention's result is copied
    before = h * RMS_NORM + (q + kv) * ROTATE * rotated + kv * 4 * adds["qkv"]
    after = h * (ADD_NORM + ADD) + f * SWIGLU * gated + q * COPY * adds_in_product
    back_before = ((q + kv) * ROTATE_BACKWARD + kv * 4) * rotated + h * NORM_BACKWARD * (not layers.kind.entrance)
    back_after = f * SWIGLU_BACKWARD * gated + h * NORM_BACKWARD
    renormed = h * RMS_NORM * (trains or setting.precision == "fp16")
    norm = trains * h * NORM_GRADIENT
    heads = trains * shape.family.qk_norm * (q + kv) * NORM_GRADIENT
    forward = before * layers.before + after * layers.after
    backward = (back_before + renormed + norm + heads) * layers.before + (back_after + renormed + norm) * layers.after
    return forward, backward


def _adds(setting: Setting, group: Group) -> bool:
    """Whether elementwise kernels add what adapters do."""
    return 0 < group.rank <= INLINE_RANKS and not setting.together


def _prefixes(setting: Setting, load: Load) -> Passes:
    """Shared prefixes: keys and values copied for each document, or a second call and its results (attention_ways)."""
    shape = setting.shape
    if not load.key_rows:
        return Passes()
    reached = reaches_language(setting.config.tune)
    if gathers_keys(load.tokens, load.key_rows):
        values = 2.0 * shape.layers * load.key_rows * shape.kv_width
        once, then = COPY * values, (COPY + SUM) * values
    else:
        values = float(shape.layers * load.tokens * shape.q_width)
        once, then = SECOND_CALL[0] * values, SECOND_CALL[1] * values
    return Passes(forward=once, backward=then * reached, again=once * reached * setting.recomputed)


def _passes(setting: Setting, layers: _Layers, forward: float, backward: float) -> Passes:
    if not reaches_language(setting.config.tune):
        return Passes(forward=forward)
    return Passes(forward=forward, backward=backward, again=forward * layers.kind.again)


def _layers(setting: Setting, load: Load) -> Iterator[_Layers]:
    shape, tune = setting.shape, setting.config.tune
    maps = shape.vision.deepstack if shape.vision is not None and load.patches else 0
    read = load.answers if setting.config.task.name == "sft" else load.documents
    reached = reaches_input(tune, sees=load.patches > 0)
    for kind, count in _kinds(shape, tune, setting.checkpointed_layers, reached, maps < shape.layers):
        few = read if kind.last else load.tokens
        yield _Layers(kind=kind, before=float(count * load.tokens), after=float(count * few))


@functools.lru_cache(maxsize=1024)  # hundreds of loads of one setting are weighed for a plan
def _kinds(
    shape: Shape, tune: TuneConfig, recomputed: int, reached: bool, halved: bool
) -> tuple[tuple[_Kind, int], ...]:  # fmt: skip
    """Kinds of layers and how many there are; `halved`: the last one's second half is computed for few rows."""
    found = Counter(
        _Kind(
            groups=tuple(layer.items()),
            last=halved and n == shape.layers - 1,
            again=n < recomputed,
            entrance=n == 0 and not reached,
        )
        for n, layer in enumerate(groups(shape, tune))
    )
    return tuple(found.items())
