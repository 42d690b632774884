"""torch's operations as `tape` records them: what each allocates, saves and allocates again for its gradients.

Each follows torch's derivative formula (tools/autograd/derivatives.yaml) or the function's own source. A closure
never captures a Value, which would keep its storage alive.
"""

from __future__ import annotations

from launcher.planning.tape.recorder import Form, Tape, Value, form, times

BOOL, FLOAT, INDEX, LONG = 1, 4, 4, 8  # bytes
ONE = form(one=1)


def tape_of(x: Value) -> Tape:
    """What a tensor is recorded on."""
    return x.storage.tape


def cast(x: Value, width: int) -> Value:
    """x.to(dtype): x itself where it has that width already."""
    if x.width == width:
        return x
    tape, rows, columns, own = tape_of(x), x.rows, x.columns, x.width
    return tape.record(tape.new(rows, columns, width), [x], lambda g: [tape.new(rows, columns, own)])


def pointwise(x: Value, *, saves: bool) -> Value:
    """A function of each number; `saves` its input for the gradient."""
    tape, rows, columns, width = tape_of(x), x.rows, x.columns, x.width
    back = lambda g: [tape.new(rows, columns, width)]  # noqa: E731
    return tape.record(tape.new(rows, columns, width), [x], back, [x] if saves else [])


def saved_result(x: Value) -> Value:
    """A function of each number, or softmax, whose gradient needs its result."""
    tape, rows, columns, width = tape_of(x), x.rows, x.columns, x.width
    out = tape.new(rows, columns, width)
    return tape.record(out, [x], lambda g: [tape.new(rows, columns, width)], [out])


def dropout(x: Value) -> Value:
    """Dropout: a mask of one byte a number is kept."""
    tape, rows, columns, width = tape_of(x), x.rows, x.columns, x.width
    mask = tape.new(rows, columns, BOOL)
    return tape.record(tape.new(rows, columns, width), [x], lambda g: [tape.new(rows, columns, width)], [mask])


def add(a: Value, b: Value) -> Value:
    """Both get the same gradient, which is not copied."""
    tape = tape_of(a)
    wants = a.needs, b.needs
    back = lambda g: [g.shared() if want else None for want in wants]  # noqa: E731
    return tape.record(tape.new(a.rows, a.columns, max(a.width, b.width)), [a, b], back)


def mul(a: Value, b: Value) -> Value:
    """Product of numbers; `b` may be one column, or rows that are repeated."""
    tape, rows, columns, width = tape_of(a), a.rows, a.columns, max(a.width, b.width)
    wants, widths, like, narrow = (a.needs, b.needs), (a.width, b.width), (b.rows, b.columns), b.columns < a.columns

    def back(g: Value) -> list[Value | None]:
        of_a = _narrowed(tape, rows, columns, width, widths[0]) if wants[0] else None
        of_b = None
        if wants[1]:
            of_b = tape.new(rows, columns, width)
            if narrow:
                of_b = tape.new(*like, width)
        return [of_a, of_b]

    saved = ([b] if a.needs else []) + ([a] if b.needs else [])
    return tape.record(tape.new(rows, columns, width), [a, b], back, saved)


def _narrowed(tape: Tape, rows: Form, columns: int, width: int, own: int) -> Value:
    wide = tape.new(rows, columns, width)
    return wide if own == width else tape.new(rows, columns, own)


def weigh(x: Value, *, trains: bool) -> Value:
    """weight * x, the weight a row of numbers: its gradient is as large as x before it is summed."""
    tape, rows, columns, width, needs = tape_of(x), x.rows, x.columns, x.width, x.needs

    def back(g: Value) -> list[Value | None]:
        if trains:
            full = tape.new(rows, columns, width)
            small = tape.new(ONE, columns, width)
            del full, small
        return [tape.new(rows, columns, width) if needs else None]

    return tape.record(tape.new(rows, columns, width), [x], back, [x] if trains else [], trains=trains)


def square(x: Value) -> Value:
    """x.pow(2), whose gradient is made of x ** 1, twice that, and the product."""
    tape, rows, columns, width = tape_of(x), x.rows, x.columns, x.width

    def back(g: Value) -> list[Value]:
        parts = [tape.new(rows, columns, width) for _ in range(3)]
        return [parts.pop()]

    return tape.record(tape.new(rows, columns, width), [x], back, [x])


def mean(x: Value) -> Value:
    """Mean of a row; its gradient is written out for every column."""
    tape, rows, columns, width = tape_of(x), x.rows, x.columns, x.width
    return tape.record(tape.new(rows, 1, width), [x], lambda g: [tape.new(rows, columns, width)])


def summed(x: Value) -> Value:
    """Sum of a row; its gradient is a view."""
    tape, rows, columns, width = tape_of(x), x.rows, x.columns, x.width
    return tape.record(tape.new(rows, 1, width), [x], lambda g: [Value(g.storage, rows, columns, width)])


def widened(x: Value) -> Value:
    """A float32 result of a kernel that reads another format."""
    tape, rows, columns, width = tape_of(x), x.rows, x.columns, x.width
    return tape.record(tape.new(rows, columns, FLOAT), [x], lambda g: [tape.new(rows, columns, width)])


def largest(x: Value, columns: int) -> Value:
    """topk: values and their places, which are kept; the gradient is scattered into zeros."""
    tape, rows, whole, width = tape_of(x), x.rows, x.columns, x.width
    places = tape.new(rows, columns, LONG)
    return tape.record(tape.new(rows, columns, width), [x], lambda g: [tape.new(rows, whole, width)], [places])


def total_of(x: Value, rows: Form) -> Value:
    """Sum over several rows for each of `rows`; the gradient is a view."""
    tape, old = tape_of(x), x.rows
    back = lambda g: [Value(g.storage, old, g.columns, g.width)]  # noqa: E731
    return tape.record(tape.new(rows, x.columns, x.width), [x], back)


def view(x: Value, rows: Form | None = None, columns: int | None = None) -> Value:
    """The same numbers in another arrangement; so is the gradient."""
    tape, old = tape_of(x), (x.rows, x.columns)
    out = Value(x.storage, x.rows if rows is None else rows, x.columns if columns is None else columns, x.width)
    return tape.record(out, [x], lambda g: [Value(g.storage, *old, g.width)])


def narrow(x: Value, columns: int) -> Value:
    """Some columns, a view; the gradient is written into zeros of the whole."""
    tape, rows, whole, width = tape_of(x), x.rows, x.columns, x.width
    out = Value(x.storage, rows, columns, width)
    return tape.record(out, [x], lambda g: [tape.new(rows, whole, width)])


def first(x: Value) -> Value:
    """x[0] of a batch of one: a view, but the gradient is written into zeros."""
    return narrow(x, x.columns)


def split(x: Value, *sizes: int) -> list[Value]:
    """Views of some columns each; their gradients are joined."""
    tape, rows, whole, width = tape_of(x), x.rows, x.columns, x.width
    joint = Value(x.storage, rows, whole, width)
    tape.record(joint, [x], lambda g: [tape.new(rows, whole, width)])
    if joint.edge is None:
        return [Value(x.storage, rows, columns, width) for columns in sizes]
    node = joint.edge[0]
    node.results = len(sizes)
    return [Value(x.storage, rows, columns, width, (node, slot)) for slot, columns in enumerate(sizes)]


def contiguous(x: Value) -> Value:
    """A copy in another order; its gradient is a view of the one it gets."""
    tape = tape_of(x)
    return tape.record(tape.new(x.rows, x.columns, x.width), [x], lambda g: [g.shared()])


def cat(a: Value, b: Value) -> Value:
    """Columns side by side; the gradients are views."""
    tape, columns, wants = tape_of(a), (a.columns, b.columns), (a.needs, b.needs)
    out = tape.new(a.rows, a.columns + b.columns, a.width)

    def back(g: Value) -> list[Value | None]:
        both = zip(wants, columns, strict=True)
        return [Value(g.storage, g.rows, n, g.width) if want else None for want, n in both]

    return tape.record(out, [a, b], back)


def linear(x: Value, columns: int, *, trains: bool, unpacked: int = 0, copies: int = 1) -> Value:
    """x @ weight.T; x is saved for the gradient of a weight that trains.

    `unpacked`: bytes that a number of a 4-bit weight takes while it is used. `copies`: experts.
    """
    tape, rows, inner, width, needs = tape_of(x), x.rows, x.columns, x.width, x.needs
    began = len(tape.moments)

    def back(g: Value) -> list[Value | None]:
        plain = tape.new(ONE, inner * columns, unpacked) if unpacked else None
        of_x = tape.new(rows, inner, width) if needs else None
        del plain
        if trains:
            tape.new(ONE, copies * inner * columns, width)  # taken away as soon as it is there
        return [of_x]

    plain = tape.new(ONE, inner * columns, unpacked) if unpacked else None
    out = tape.record(tape.new(rows, columns, width), [x], back, [x] if trains else [], trains=trains)
    del plain
    if out.edge is not None:  # the weight is saved for the gradient of x
        out.edge[0].uses, tape.last_saved = True, began
    return out


def layer_norm(x: Value, *, trains: bool) -> Value:
    """LayerNorm keeps x and two float32 numbers a row."""
    tape, rows, columns, width, needs = tape_of(x), x.rows, x.columns, x.width, x.needs
    out, numbers = tape.new(rows, columns, width), tape.new(rows, 2, FLOAT)
    back = lambda g: [tape.new(rows, columns, width) if needs else None]  # noqa: E731
    return tape.record(out, [x], back, [x, numbers], trains=trains)


def take(x: Value, rows: Form, index: Value | None = None) -> Value:
    """x[index], rows of x; `index` is kept where nothing else keeps it. The gradient is added into zeros."""
    tape, old, columns, width = tape_of(x), x.rows, x.columns, x.width
    out = tape.new(rows, columns, width)
    return tape.record(out, [x], lambda g: [tape.new(old, columns, width)], [] if index is None else [index])


def put(x: Value, values: Value, *, copies: bool = True, index: Value | None = None) -> Value:
    """x.index_put(index, values), into a copy of x or in place; two gradients."""
    tape, rows, columns, width = tape_of(x), x.rows, x.columns, x.width
    wants, few = (x.needs, values.needs), values.rows

    def back(g: Value) -> list[Value | None]:
        of_x = tape.new(rows, columns, width) if wants[0] else None
        return [of_x, tape.new(few, columns, width) if wants[1] else None]

    out = tape.new(rows, columns, width) if copies else Value(x.storage, rows, columns, width)
    return tape.record(out, [x, values], back, [] if index is None else [index])


def add_rows(x: Value, values: Value) -> Value:
    """x.index_add(0, index, values): its gradient is x's too, and that of `values` some rows of it."""
    tape, wants, few, columns, width = tape_of(x), (x.needs, values.needs), values.rows, x.columns, x.width

    def back(g: Value) -> list[Value | None]:
        return [g.shared() if wants[0] else None, tape.new(few, columns, width) if wants[1] else None]

    # torch keeps `values` for their shape.
    return tape.record(tape.new(x.rows, columns, width), [x, values], back, [values] if values.needs else [])


def embedding(
    tape: Tape, rows: Form, count: int, columns: int, width: int, *, trains: bool, index: Value | None = None
) -> Value:  # fmt: skip
    """Rows of a table of `count`; the gradient of one that trains has the whole table's size, and needs `index`."""

    def back(g: Value) -> list[Value | None]:
        tape.new(ONE, count * columns, width)
        return []

    saved = [index] if index is not None else []
    return tape.record(tape.new(rows, columns, width), [], back, saved, trains=trains)


def answer_losses(x: Value, vocab: int, *, trains: bool) -> Value:
    """launcher.training.token_loss: one block of logits at a time; of a frozen head, rows of x's gradient are kept."""
    tape, rows, columns, width, needs = tape_of(x), x.rows, x.columns, x.width, x.needs
    block = form(chunk=vocab * width)
    saved = [x] if trains else [tape.new(rows, columns, width)] if needs else []
    out = tape.new(rows, 1, FLOAT)
    statistics = [tape.new(rows, 1, FLOAT), tape.new(rows, 1, FLOAT)] if trains else []
    tape.passing(block)

    def back(g: Value) -> list[Value | None]:
        of_x = tape.new(rows, columns, width) if needs else None
        if trains:
            of_weight = tape.new(ONE, vocab * columns, FLOAT)
            tape.passing(block)
            tape.passing(times(ONE, vocab * columns * width))  # its sum in the model's format
            del of_weight
        return [of_x]

    return tape.record(out, [x], back, saved + statistics, trains=trains)
