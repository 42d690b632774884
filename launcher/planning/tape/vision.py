"""The layers of the vision towers for a `tape` (see `decoder`)."""

from __future__ import annotations

from launcher.planning.shapes import VisionShape
from launcher.planning.tape import mixing
from launcher.planning.tape import operations as op
from launcher.planning.tape.parts import FEATURES, PATCHES, VISUAL, Tuned, linear, rms_norm, rotate, swiglu
from launcher.planning.tape.recorder import Tape, Value, times


def vision_block(x: Value, v: VisionShape, tuned: Tuned) -> Value:
    """A block of a vision tower."""
    window = v.kind == "qwen2_5"

    def norm(value: Value) -> Value:
        return rms_norm(value, tuned) if window else op.layer_norm(value, trains=tuned.whole)

    x = op.add(x, _vision_attention(norm(x), v, tuned))
    if window:
        return op.add(x, swiglu(norm(x), "mlp", v.block, tuned))
    inner = op.pointwise(linear(norm(x), "mlp.linear_fc1", v.block, tuned), saves=True)
    return op.add(x, linear(inner, "mlp.linear_fc2", v.block, tuned))


def _vision_attention(x: Value, v: VisionShape, tuned: Tuned) -> Value:
    joint = linear(x, "attn.qkv", v.block, tuned)
    query, key, value = op.split(joint, v.hidden, v.hidden, v.hidden)
    width = x.width
    query, key = op.cast(query, op.FLOAT), op.cast(key, op.FLOAT)
    query, key = rotate(query, v.hidden), rotate(key, v.hidden)
    query, key = op.cast(query, width), op.cast(key, width)
    out = mixing.flash(op.first(query), op.first(key), op.first(value), v.heads)
    return linear(out, "attn.proj", v.block, tuned)


def merger(x: Value, v: VisionShape, tuned: Tuned, *, after: bool) -> Value:
    """Patches of a visual token side by side -> one row of the language model; `after`: normalised side by side."""
    if after:
        x = op.view(x, FEATURES, v.merged)
    x = rms_norm(x, tuned) if v.kind == "qwen2_5" else op.layer_norm(x, trains=tuned.whole)
    x = x if after else op.view(x, FEATURES, v.merged)
    first, second = v.merger
    return linear(op.pointwise(linear(x, first, v.merger, tuned), saves=True), second, v.merger, tuned)


def deepstack(x: Value, visual: Value) -> Value:
    """Visual features added to the rows of the visual tokens, after one of the first layers."""
    tape = x.storage.tape
    x = op.contiguous(x)  # clone
    rows = op.take(x, VISUAL, tape.new(VISUAL, 2, op.LONG))  # a mask's indices, found anew each time
    rows = op.add(rows, visual)
    return op.put(x, rows, copies=False, index=tape.new(VISUAL, 2, op.LONG))


def add_maps(x: Value, visual: Value) -> Value:
    """The same between layers of the fused functions, whose rows are known numbers."""
    return op.add_rows(x, visual)


def embed_patches(x: Value, v: VisionShape, tuned: Tuned) -> Value:
    """Pixels of a patch -> its first hidden state, positions added (Qwen3-VL) or windows put together (Qwen2.5-VL)."""
    tape, width = x.storage.tape, x.width
    x = op.linear(x, v.hidden, trains=tuned.whole)
    if v.kind == "qwen2_5":
        return op.take(x, PATCHES)
    four, trains = times(PATCHES, 4), tuned.whole
    index = tape.new(four, 1, op.LONG)
    corners = op.embedding(tape, four, v.positions, v.hidden, width, trains=trains, index=index)
    position = _summed_corners(op.mul(corners, tape.new(four, 1, op.FLOAT)), v)
    del corners
    return op.add(x, op.cast(position, width))


def fast_block(x: Value, delta: Value | None, v: VisionShape) -> Value:
    """What a block's MLP adds, of launcher.training.vision_tower: nothing is kept, sums are made in place.

    `delta`, what the block before added, is held to the end.
    """
    tape, rows, hidden, width = x.storage.tape, x.rows, v.hidden, x.width
    normed = tape.new(rows, hidden, width)
    qkv = tape.new(rows, 3 * hidden, width)
    del normed
    mixed, sums = tape.new(rows, hidden, width), tape.new(rows, v.heads, op.FLOAT)
    del sums
    projected = tape.new(rows, hidden, width)
    normed = tape.new(rows, hidden, width)
    del projected
    inner = [tape.new(rows, v.intermediate, width) for _ in range(2 if v.kind == "qwen2_5" else 1)]
    inner = inner[:1]  # the gate, which silu(gate) * up takes the place of
    out = tape.new(rows, hidden, width)
    del normed, qkv, mixed, inner
    return out


def fast_patches(tape: Tape, v: VisionShape, width: int) -> Value:
    """Embedded patches, of launcher.training.vision_tower."""
    x = tape.new(PATCHES, v.hidden, width)
    return op.take(x, PATCHES) if v.kind == "qwen2_5" else x


def _summed_corners(x: Value, v: VisionShape) -> Value:
    """Four weighted positions of a patch -> one; the gradient is a view."""
    tape, rows = x.storage.tape, x.rows
    out = tape.new(PATCHES, v.hidden, op.FLOAT)
    return tape.record(out, [x], lambda g: [Value(g.storage, rows, g.columns, g.width)])
