"""The parameters of a tuned model by size: ZeRO-3 shards, pads and gathers each one by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.families import trains_fully
from launcher.planning.models import linear_modules, lora_modules, parameter_counts, trainable_counts
from launcher.planning.shapes import Shape
from launcher.spec import TaskConfig, TuneConfig


@dataclass(frozen=True, slots=True)
class Tensors:
    """`count` parameters of `size` elements each; `size` 0 stands for the small rest of a part, `count` elements."""

    size: int
    count: int
    part: str
    trained: bool
    four_bit: bool = False

    @property
    def elements(self) -> int:
        """Of all of them."""
        return self.size * self.count if self.size else self.count


@functools.lru_cache(maxsize=256)
def tensors(shape: Shape, tune: TuneConfig, task: str, classes: int) -> tuple[Tensors, ...]:
    """The parameters of a tuned model: matrices one by one, all norms and biases of a part together."""
    counts, found = parameter_counts(shape), list[Tensors]()
    for part, total in counts.items():
        trained = trains_fully(part, tune) or (part == "head" and task == "sft" and tune.head == "full")
        sizes = list(_matrices(shape, part))
        quantized = {size for name, size in sizes if tune.name == "qlora" and part == "language" and name}
        by_size: dict[int, int] = {}
        for _, size in sizes:
            by_size[size] = by_size.get(size, 0) + 1
        found += [Tensors(size, n, part, trained, size in quantized) for size, n in by_size.items()]
        found.append(Tensors(0, total - sum(size * n for size, n in by_size.items()), part, trained))
    modules = linear_modules(shape)
    adapters: dict[tuple[int, str], int] = {}
    for name in lora_modules(shape, tune):
        wide, narrow = modules[name]
        for size in (tune.r * wide, tune.r * narrow, *((narrow,) if tune.use_dora else ())):
            key = size, shape.family.part_of(name)
            adapters[key] = adapters.get(key, 0) + 1
    found += [Tensors(size, n, f"adapters of {part}", True) for (size, part), n in adapters.items()]
    rest = sum(trainable_counts(shape, tune, TaskConfig(name=task, classes=[""] * classes)).values())
    rest -= sum(t.elements for t in found if t.trained)
    return tuple(t for t in (*found, Tensors(0, rest, "head", True)) if t.elements)


def _matrices(shape: Shape, part: str) -> Iterator[tuple[bool, int]]:
    """(whether it is a linear module, elements) of the large parameters of a part."""
    vocabulary, v, e = shape.vocab * shape.hidden, shape.vision, shape.experts
    for name, (wide, narrow) in linear_modules(shape).items():
        if name != "lm_head" and shape.family.part_of(name) == part:
            yield True, wide * narrow
    if part == "embeddings" or (part == "head" and not shape.tied):
        yield False, vocabulary
    if part == "language" and e is not None:
        for _ in range(shape.layers):
            yield from ((False, e.count * n * shape.hidden * e.intermediate) for n in (2, 1))
            yield False, e.count * shape.hidden
    if part == "vision" and v is not None:
        yield from ((False, n) for n in (v.patch_values * v.hidden, v.positions * v.hidden) if n)
