"""Decoder layers of the fused functions (launcher.training.fused) for a `tape`: two operations around attention.

Kernels allocate their results and nothing else; what is written in place of an argument is no allocation here either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.kernels import row_stride
from launcher.planning.shapes import Linears, Shape
from launcher.planning.tape import operations as op
from launcher.planning.tape.decoder import Packing, packed_attention
from launcher.planning.tape.joined import Held, Joined
from launcher.planning.tape.operations import FLOAT, ONE
from launcher.planning.tape.parts import Tuned
from launcher.planning.tape.recorder import Form, Tape, Value

SUMS = 128  # rows of sums that the gradient of a norm's weight is made of, at most (kernels_weights.MOST_SUMS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A layer, as both of its functions need it."""

    qkv: Joined
    out: Joined
    gate_up: Joined
    down: Joined
    hidden: int
    queries: int  # width of all query heads together
    keys: int
    head: int  # of one
    head_norms: bool
    trains: bool  # norms and weights
    width: int
    renormed: bool  # normed inputs come again in the backward pass: weights train, or float16


def sizes_of(
    shape: Shape, linears: Linears, tuned: Tuned, width: int, *, half: bool, together: bool
) -> Sizes:  # fmt: skip
    """Sizes of a layer; `half`: the format is float16; `together`: frozen weights stay where they are (not ZeRO-3)."""

    def joined(prefix: str, *names: str, bias: bool = False) -> Joined:
        full = [f"{prefix}.{name}" for name in names]
        return Joined(
            inner=linears[full[0]][0],
            outers=tuple(linears[name][1] for name in full),
            ranks=tuple(tuned.r if name in tuned.adapted else 0 for name in full),
            trains=tuned.whole,
            biases=bias,
            four_bit=tuned.four_bit,
            together=together and not tuned.whole and not tuned.four_bit,
            width=width,
        )

    biased = shape.family.qkv_bias or shape.attention_bias
    return Sizes(
        qkv=joined("self_attn", "q_proj", "k_proj", "v_proj", bias=biased),
        out=joined("self_attn", "o_proj", bias=shape.attention_bias and not shape.family.qkv_bias),
        gate_up=joined("mlp", "gate_proj", "up_proj"),
        down=joined("mlp", "down_proj"),
        hidden=shape.hidden,
        queries=shape.q_width,
        keys=shape.kv_width,
        head=shape.head_dim,
        head_norms=shape.family.qk_norm,
        trains=tuned.whole,
        width=width,
        renormed=tuned.whole or half,
    )


def fused_layer(x: Value, s: Sizes, heads: int, packing: Packing, rows: Form | None) -> Value:
    """A decoder layer; `rows`: of the last one, those that its second half is computed for."""
    q, k, v, x = _before(x, s)
    attended = op.view(packed_attention(q, k, v, heads, packing))
    if rows is not None:
        x, attended = op.take(x, rows), op.take(attended, rows)
    return _after(x, attended, s)


def _before(x: Value, s: Sizes) -> list[Value]:
    """Queries, keys, values (a view of all three before rotation) and x again."""
    tape, rows, wanted = op.tape_of(x), x.rows, x.needs
    normed, rstd = _normed(tape, rows, s, s.qkv.spare)
    qkv, b, h = s.qkv.forward(tape, rows, wide=True)
    q, k = tape.new(rows, s.queries, s.width), tape.new(rows, s.keys, s.width)

    def back(slopes: Sequence[Value | None]) -> list[Value | None]:
        b = s.qkv.low(tape)
        dqkv = tape.new(rows, row_stride(s.qkv.outer, s.qkv.spare), s.width)
        if s.head_norms and s.trains:
            _head_norm_gradient(tape, rows, s)
        dx, *_held = _through_norm(tape, rows, s.qkv, s, s.down.spare, wanted=wanted)
        del b, dqkv
        return [dx]

    saved = [v for v in (x, rstd, qkv, *h) if v is not None]
    joint = tape.record(x.shared(), [x], back, saved, trains=s.trains or s.qkv.rank > 0)
    outs = [q, k, Value(qkv.storage, rows, s.keys, s.width), x.shared()]
    del normed, b, h, saved
    if joint.edge is not None:
        node = joint.edge[0]
        node.results = len(outs)
        for slot, out in enumerate(outs):
            out.edge = node, slot
    return outs


def _after(x: Value, attended: Value, s: Sizes) -> Value:
    """The layer's result, from its input x and what attention gave."""
    tape, rows, wants = op.tape_of(x), x.rows, (x.needs, attended.needs)
    delta, b, h_out = s.out.forward(tape, rows, wide=False)
    middle = tape.new(rows, s.hidden, s.width)
    normed, rstd = _normed(tape, rows, s, s.gate_up.spare)
    del delta
    gate_up, b, h = s.gate_up.forward(tape, rows, wide=True)
    del normed
    act = tape.new(rows, row_stride(s.down.inner, s.down.spare), s.width)
    delta, b, h_down = s.down.forward(tape, rows, wide=True)
    out = tape.new(rows, s.hidden, s.width)

    def back(dy: Value) -> list[Value | None]:
        g = s.down.slope(tape, rows)
        dact = s.down.backward_input(tape, rows)
        s.gate_up.low(tape)
        held = _gradients(tape, s.down)
        del dact
        dmiddle, *more = _through_norm(tape, rows, s.gate_up, s, s.out.spare, wanted=True)
        g = s.out.slope(tape, rows)
        dattended = s.out.backward_input(tape, rows)
        held += [*more, *_gradients(tape, s.out)]
        del g
        return [value if want else None for value, want in zip((dmiddle, dattended), wants, strict=True)]

    saved = [v for v in (attended, middle, rstd, gate_up, *h_out, *h, *h_down) if v is not None]
    adapted = max(s.out.rank, s.gate_up.rank, s.down.rank) > 0
    tape.record(out, [x, attended], back, saved, trains=s.trains or adapted)
    del act, delta, b, h_out, h, h_down, saved
    return out


def _normed(tape: Tape, rows: Form, s: Sizes, spare: int = 0) -> tuple[Value, Value]:
    """RMSNorm's result, with spare columns, and 1 / rms."""
    return tape.new(rows, row_stride(s.hidden, spare), s.width), tape.new(rows, 1, FLOAT)


def _gradients(tape: Tape, j: Joined) -> Held:
    return j.gradients(tape, j.weights(tape, j.rank * j.inner) if j.rank else [])


def _through_norm(tape: Tape, rows: Form, j: Joined, s: Sizes, spare: int, *, wanted: bool) -> Held:
    """Gradient of the norm's input, with spare columns (None: nobody wants it), of its weight and of `j`."""
    g = j.slope(tape, rows)
    normed = _normed(tape, rows, s) if s.renormed else None
    da: Held = []
    if j.rank:
        scaled = _scaled(tape, rows, j) if normed is None else []
        da = j.weights(tape, j.rank * j.inner)
        if scaled:
            scaled.clear()
            da = [j.weights(tape, j.rank * j.inner)[0] for _ in da]  # times the norm's weight
    found = j.gradients(tape, da)
    if not wanted and not s.trains:
        return [None, *found]
    back = j.backward_input(tape, rows)
    if s.trains:
        _norm_gradient(tape, s)
        found += j.weights(tape, s.hidden)
    dx = tape.new(rows, row_stride(s.hidden, spare), s.width)
    del back, g, normed
    return [dx if wanted else None, *found]


def _scaled(tape: Tape, rows: Form, j: Joined) -> Held:
    """A thin matrix by 1 / rms in float32, then rounded."""
    wide = tape.new(rows, j.rank, FLOAT)
    return [wide if j.width == FLOAT else tape.new(rows, j.rank, j.width)]


def _norm_gradient(tape: Tape, s: Sizes) -> None:
    """launcher.training.fused.kernels_weights.norm_weight_gradient: sums of blocks of rows, few of them."""
    tape.new(ONE, SUMS * s.hidden, FLOAT)


def _head_norm_gradient(tape: Tape, rows: Form, s: Sizes) -> None:
    """launcher.training.fused.kernels_weights.head_norm_weight_gradient: sums of blocks of 16 rows."""
    tape.new(rows, max(s.head // 16, 1), FLOAT)
