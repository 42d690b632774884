"""Bytes of a piece of a forward pass and of its backward pass, followed one allocation at a time, for any sizes.

Operations are recorded as torch's autograd records them: what each saves, what its gradient allocates, in the order
in which the engine runs. Python's own reference counts free a storage, as torch's do, so code that is written like a
model's forward has its lifetimes too. Sizes are linear forms over the numbers of a micro-batch, so that one recording
serves every micro-batch: its moments are maximised over later.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# What sizes depend on: bytes are a sum over these, each times an integer. `one` is 1: sizes of weights.
NAMES = (
    *("one", "tokens", "keys", "segments", "visual", "patches", "features", "documents"),
    *("squares", "answers", "chunk", "decoded", "frame", "prefixes"),
)
Form = tuple[int, ...]
ZERO: Form = (0,) * len(NAMES)
# Uses of a storage that one gradient alone has: its value's, the engine's look at it, and sys.getrefcount's own.
ALONE = 2


def form(**sizes: int) -> Form:
    """A linear form from its coefficients."""
    return tuple(sizes.get(name, 0) for name in NAMES)


def plus(a: Form, b: Form) -> Form:
    """Sum of two forms."""
    return tuple([x + y for x, y in zip(a, b, strict=True)])


def times(a: Form, factor: int) -> Form:
    """A form many times."""
    return tuple([x * factor for x in a])


def fullest(moments: Iterable[Form]) -> tuple[Form, ...]:
    """The moments that can be the fullest of some micro-batch: without those that another is nowhere below."""
    kept: list[Form] = []
    for moment in sorted(set(moments), key=sum, reverse=True):
        if not any(all(x <= y for x, y in zip(moment, other, strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)


class Storage:
    """Bytes that are alive as long as something refers to them."""

    __slots__ = ("size", "tape")

    def __init__(self, tape: Tape, size: Form) -> None:
        self.tape, self.size = tape, size
        tape.alive = plus(tape.alive, size)
        tape.moments.append(tape.alive)

    def __del__(self) -> None:
        self.tape.alive = plus(self.tape.alive, times(self.size, -1))


Back = Callable[[Any], Sequence["Value | None"]]
Edge = tuple["Node", int]  # an operation, and which of its results


class Node:
    """An operation that the backward pass undoes: whom its gradients go to, what it saved for them."""

    __slots__ = ("back", "edges", "number", "results", "saved", "uses")

    def __init__(self, number: int, edges: list[Edge | None], saved: tuple[Storage, ...], back: Back) -> None:
        self.number, self.edges, self.saved, self.back = number, edges, saved, back
        self.uses = bool(saved)  # something that was saved, be it a weight
        self.results = 1  # `back` takes their gradients: one, or a list of several


class Value:
    """A tensor: `rows` (a form) x `columns` numbers of `width` bytes in a storage, maybe others' too."""

    __slots__ = ("columns", "edge", "rows", "storage", "width")

    def __init__(self, storage: Storage, rows: Form, columns: int, width: int, edge: Edge | None = None) -> None:
        self.storage, self.rows, self.columns, self.width, self.edge = storage, rows, columns, width, edge

    @property
    def needs(self) -> bool:
        """Whether a gradient is wanted of it."""
        return self.edge is not None

    def shared(self) -> Value:
        """The same numbers as another tensor."""
        return Value(self.storage, self.rows, self.columns, self.width)


class Tape:
    """Records operations and plays them back."""

    def __init__(self, *, saving: bool = True) -> None:
        self.alive: Form = ZERO
        self.moments: list[Form] = []
        self.count = 0
        self.last_saved = 0  # moments when the last operation began that saves anything, be it a weight
        self.first_use: Form | None = None  # alive in the backward pass when anything saved is needed first
        self.saving = saving  # not the operations of a layer that will be recomputed

    def new(self, rows: Form, columns: int, width: int) -> Value:
        """A tensor of its own storage."""
        return Value(Storage(self, times(rows, columns * width)), rows, columns, width)

    def leaf(self, rows: Form, columns: int, width: int) -> Value:
        """A tensor whose gradient is wanted, and which nothing made."""
        value = self.new(rows, columns, width)
        value.edge = Node(-1, [], (), lambda g: ()), 0
        return value

    def passing(self, size: Form) -> None:
        """Bytes that a kernel takes and gives back."""
        self.moments.append(plus(self.alive, size))

    def record(
        self, out: Value, inputs: Sequence[Value], back: Back, saved: Sequence[Value] = (), *, trains: bool = False
    ) -> Value:
        """Make `out` the result of an operation on `inputs`; `back` gives a gradient for each of them.

        `trains`: the operation has a weight that trains, so that it has a gradient whatever its inputs want.
        """
        if trains or any(value.needs for value in inputs):
            self.count += 1
            if saved:
                self.last_saved = len(self.moments)
            storages = tuple(value.storage for value in saved) if self.saving else ()
            out.edge = Node(self.count, [value.edge for value in inputs], storages, back), 0
        return out

    def backward(self, starts: list[tuple[Edge, Value]]) -> dict[Node, Value]:
        """Play back from the gradients of some results, a list that is emptied; returns the gradients of leaves.

        As torch's engine: the latest operation first; saved tensors are freed as soon as it is done; a second
        gradient is added into the first where nothing else has its storage, else a third tensor is their sum.
        """
        waiting = _dependencies([node for (node, _), _ in starts])
        buffers: dict[Node, list[Value | None]] = {}
        leaves: dict[Node, Value] = {}
        ready: list[tuple[int, int, Node]] = []

        def arrive(edge: Edge, gradient: Value) -> None:
            slots = buffers.setdefault(edge[0], [None] * edge[0].results)
            held = slots[edge[1]]
            if held is None:
                slots[edge[1]] = gradient.shared()
            elif sys.getrefcount(held.storage) > ALONE:
                slots[edge[1]] = self.new(held.rows, held.columns, held.width)

        def push(node: Node) -> None:
            if not waiting.get(node) and node in buffers:
                heapq.heappush(ready, (-node.number, id(node), node))

        nodes = dict.fromkeys(edge[0] for edge, _ in starts)
        while starts:
            arrive(*starts.pop())
        for node in nodes:
            push(node)
        while ready:
            node = heapq.heappop(ready)[2]
            given = buffers.pop(node)
            if node.number < 0:
                (leaf,) = given
                assert leaf is not None
                leaves[node] = leaf
                continue
            if node.uses and self.first_use is None:
                self.first_use = self.alive
            results = list(node.back(given[0] if node.results == 1 else given))
            given.clear()
            node.saved = ()
            for edge in node.edges:
                result = results.pop(0)
                if edge is not None:
                    if result is not None:
                        arrive(edge, result)
                    waiting[edge[0]] -= 1
                    push(edge[0])
                del result
        return leaves


def _dependencies(roots: list[Node]) -> dict[Node, int]:
    """How many gradients each operation will be given."""
    counts: dict[Node, int] = {}
    seen = set[Node]()
    while roots:
        node = roots.pop()
        if node not in seen:
            seen.add(node)
            for edge in node.edges:
                if edge is not None:
                    counts[edge[0]] = counts.get(edge[0], 0) + 1
                    roots.append(edge[0])
    return counts
