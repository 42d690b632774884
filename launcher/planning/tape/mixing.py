"""Operations along the sequence, as `operations`: attention by each kernel, and the gated delta rule's products."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.planning.tape.operations import FLOAT, LONG, tape_of
from launcher.planning.tape.recorder import Form, Tape, Value, form, plus, times

KEYS = form(keys=1)


Shape = tuple[Form, int, int]  # rows, columns, width


def flash(q: Value, k: Value, v: Value, heads: int, *, way: str = "own", kernel: str = "varlen") -> Value:
    """Attention over segments by a flash `kernel`, PyTorch's by default (launcher.training.attention_ways).

    `way`: own (no prefix is shared) | gathered (copies of its prefix's keys for each segment) | cascade (two calls).
    Queries, keys and values, the result and a float32 number a query and head are kept.
    """
    tape, given = tape_of(q), [_shape(t) for t in (q, k, v)]
    result = [(q.rows, q.columns, q.width), (q.rows, heads, FLOAT)]
    copies = _made(tape, [_of_rows(KEYS, shape) for shape in given[1:]] if way == "gathered" else [])
    out, sums = (tape.new(*shape) for shape in result)
    copies.clear()
    if way == "cascade":
        _made(tape, result).clear()
    wants = [t.needs for t in (q, k, v)]

    def back(g: Value) -> list[Value | None]:
        called = given if way != "gathered" else [given[0], *(_of_rows(KEYS, shape) for shape in given[1:])]
        copies = _made(tape, called[1:] if way == "gathered" else [])
        found = _made(tape, called)
        tape.passing(_inside(called, heads, 128, kernel=kernel))
        copies.clear()
        if way == "gathered":
            tape.passing(form(keys=2 * LONG, tokens=LONG))  # an order of the rows
            found = [found[0], *_made(tape, given[1:])]
        if way == "cascade":
            # The second call has an entry a group, which has two documents or more as a rule.
            called = [given[0], *(_of_rows(form(prefixes=1), shape) for shape in given[1:])]
            more = _made(tape, called)
            tape.passing(_inside(called, heads, 64, kernel=kernel))
            more.clear()
        return [value if want else None for value, want in zip(found, wants, strict=True)]

    return tape.record(out, [q, k, v], back, [q, k, v, out, sums])


def _shape(x: Value) -> Shape:
    return x.rows, x.columns, x.width


def _of_rows(rows: Form, shape: Shape) -> Shape:
    return rows, *shape[1:]


def _made(tape: Tape, shapes: Sequence[Shape]) -> list[Value]:
    return [tape.new(*shape) for shape in shapes]


def _inside(called: Sequence[Shape], heads: int, padding: int, *, kernel: str) -> Form:
    """Buffers of a backward kernel: a float32 sum of the queries' gradient, and gradients of keys and values for every
    query head where several share a key head.

    PyTorch's (flash_api.cpp) pads every segment by `padding` rows and the head size, and has the latter in 16 bits;
    cuDNN's workspaces, measured on an H200, have them in float32, and rows rounded up. flash-attn 4 sums the latter up
    in float32 for every key head (flash_attn/cute/interface.py).
    """
    (rows, columns, width), (keys, key_columns, _), _ = called
    head = columns // heads
    rounded = -(-head // 32) * 32 if head <= 128 else -(-head // 64) * 64
    padded = plus(rows, form(one=1024) if kernel == "cudnn" else form(segments=padding))
    each = {"cudnn": columns * FLOAT, "flash_attention_4": key_columns * FLOAT}.get(kernel, columns * width)
    expanded = 2 * each if key_columns != columns else 0
    return plus(times(padded, FLOAT * heads * (1 + rounded)), times(keys, expanded))


def gathered(x: Value, rows: Form = KEYS) -> Value:
    """Rows of x, some more than once: their gradients are added up in float32 (attention_packages.Gather)."""
    tape, old, columns, width = tape_of(x), x.rows, x.columns, x.width

    def back(g: Value) -> list[Value]:
        wide = [tape.new(count, columns, FLOAT) for count in (rows, old)] if width != FLOAT else []
        narrow = tape.new(old, columns, width)
        wide.clear()
        return [narrow]

    return tape.record(tape.new(rows, columns, width), [x], back)


def padded_attention(q: Value, k: Value, v: Value, heads: int, keys: Form) -> Value:
    """Attention over padded segments by torch's plain formula, which keeps the weight of every pair for each head:
    no fused kernel takes a mask and shared key heads. An estimate; only float32 on GPUs needs it."""
    tape, pairs = tape_of(q), form(squares=1)
    wants, shapes = [t.needs for t in (q, k, v)], [(t.rows, t.columns, t.width) for t in (q, k, v)]
    columns, width = q.columns, q.width
    out = tape.new(q.rows, columns, width)
    padded = [tape.new(rows, columns, width) for rows in (q.rows, keys, keys)]
    weights = tape.new(pairs, heads, width)
    tape.passing(times(pairs, heads * width))

    def back(g: Value) -> list[Value | None]:
        found: list[Value | None] = [tape.new(*shape) for shape in shapes]
        tape.passing(times(pairs, 2 * heads * width))
        return [value if want else None for value, want in zip(found, wants, strict=True)]

    return tape.record(out, [q, k, v], back, [*padded, weights])


def masked_attention(q: Value, k: Value, v: Value, bias: Form) -> Value:
    """torch's memory-efficient attention with a mask, which becomes numbers: [documents, 1, longest, longest].

    Its backward kernel sums in float32 (pytorch, mem_eff_attention/kernel_backward.h).
    """
    tape = tape_of(q)
    mask, out = tape.new(bias, 1, q.width), tape.new(q.rows, q.columns, q.width)
    shapes = [(t.rows, t.columns, t.width) for t in (q, k, v)]
    wants = [t.needs for t in (q, k, v)]
    sums = times(q.rows, FLOAT * (q.columns + k.columns + v.columns))

    def back(g: Value) -> list[Value | None]:
        found: list[Value | None] = [tape.new(*shape) for shape in shapes]
        tape.passing(sums)
        return [value if want else None for value, want in zip(found, wants, strict=True)]

    return tape.record(out, [q, k, v], back, [q, k, v, mask, out])


def repeat(x: Value, columns: int) -> Value:
    """Every head several times; the gradients are summed."""
    tape, rows, own, width = tape_of(x), x.rows, x.columns, x.width
    return tape.record(tape.new(rows, columns, width), [x], lambda g: [tape.new(rows, own, width)])


def product(a: Value, b: Value, columns: int) -> Value:
    """Products of matrices inside chunks, both factors kept."""
    tape = tape_of(a)
    wants, shapes, rows, width = (a.needs, b.needs), ((a.columns,), (b.columns,)), a.rows, a.width
    back = lambda g: [tape.new(rows, s[0], width) if want else None for want, s in zip(wants, shapes, strict=True)]  # noqa: E731
    saved = ([b] if a.needs else []) + ([a] if b.needs else [])
    return tape.record(tape.new(rows, columns, width), [a, b], back, saved)


def solved(system: Value, b: Value) -> Value:
    """A triangular system solved: both its result and itself are kept."""
    tape, rows, width = tape_of(b), b.rows, b.width
    out, columns, side = tape.new(rows, b.columns, width), b.columns, system.columns

    def back(g: Value) -> list[Value | None]:
        of_b = tape.new(rows, columns, width)
        of_system = [tape.new(rows, side, width) for _ in range(2)]  # a product, and its triangle
        return [of_system.pop(), of_b]

    return tape.record(out, [system, b], back, [system, out])


def scan(values: Value, decayed: Value, query: Value, key: Value, inside: Value, state: int) -> Value:
    """The loop over chunks of the gated delta rule: the state before each chunk and its new values are kept.

    `state`: numbers of the states, a token. Every chunk's gradient is written into zeros of the whole and added.
    """
    tape, rows, width = tape_of(values), values.rows, values.width
    out = tape.new(rows, values.columns, width)
    states, fresh = tape.new(rows, state, width), tape.new(rows, values.columns, width)
    given = (values, decayed, query, key, inside)
    shapes, columns = [t.columns for t in given], values.columns

    def back(g: Value) -> list[Value | None]:
        whole = tape.new(rows, columns, width)
        found: list[Value | None] = [tape.new(rows, n, width) for n in shapes]
        tape.passing(times(rows, max(shapes) * width))
        del whole
        return found

    return tape.record(out, given, back, [*given, states, fresh])
