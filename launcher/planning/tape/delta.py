"""The mixing layers of Qwen3.5 for a `tape` (see `decoder`): documents are padded rows, most layers carry a state."""

from __future__ import annotations

from launcher.planning.shapes import Linears, Shape
from launcher.planning.tape import mixing
from launcher.planning.tape import operations as op
from launcher.planning.tape.parts import TOKENS, Tuned, head_norm, linear, rms_norm, rotate
from launcher.planning.tape.recorder import Value, form, times

CHUNK = 64  # rows of a chunk of the gated delta rule


def gated_attention(x: Value, shape: Shape, linears: Linears, tuned: Tuned) -> Value:
    """Attention of Qwen3.5: half of q_proj gates the output, part of a head turns, documents are padded rows."""
    both = linear(x, "self_attn.q_proj", linears, tuned)
    query, gate = op.split(both, shape.q_width, shape.q_width)
    gate = op.contiguous(gate)
    query = head_norm(query, shape.heads, tuned, zero_centred=True)
    key = head_norm(linear(x, "self_attn.k_proj", linears, tuned), shape.kv_heads, tuned, zero_centred=True)
    value = linear(x, "self_attn.v_proj", linears, tuned)
    query, key = rotate(query, shape.heads * shape.turning), rotate(key, shape.kv_heads * shape.turning)
    repeated = mixing.repeat(key, shape.q_width), mixing.repeat(value, shape.q_width)
    out = mixing.masked_attention(query, *repeated, form(squares=1))
    del repeated
    out = op.mul(out, op.saved_result(gate))
    return linear(out, "self_attn.o_proj", linears, tuned)


def delta_net(x: Value, shape: Shape, linears: Linears, tuned: Tuned) -> Value:
    """A gated delta net in plain PyTorch, as without the package flash-linear-attention."""
    d = shape.delta
    assert d is not None
    width = x.width
    x = op.mul(x, x.storage.tape.new(TOKENS, 1, op.BOOL))  # padding is silenced
    mixed = linear(x, "linear_attn.in_proj_qkv", linears, tuned)
    z = linear(x, "linear_attn.in_proj_z", linears, tuned)
    b = linear(x, "linear_attn.in_proj_b", linears, tuned)
    a = linear(x, "linear_attn.in_proj_a", linears, tuned)
    mixed = op.pointwise(op.pointwise(mixed, saves=True), saves=True)  # convolution, then silu
    query, key, value = op.split(mixed, d.keys, d.keys, d.values)
    beta, decay = op.saved_result(b), op.mul(op.cast(a, op.FLOAT), op.cast(a, op.FLOAT))
    out = _delta_rule(query, key, value, beta, decay, shape)
    out = op.cast(out, width)
    out = _gated_norm(out, z, d.heads, tuned)
    return linear(out, "linear_attn.out_proj", linears, tuned)


def _delta_rule(query: Value, key: Value, value: Value, beta: Value, decay: Value, shape: Shape) -> Value:
    """transformers' torch_chunk_gated_delta_rule."""
    d = shape.delta
    assert d is not None
    heads = d.heads
    key_width = heads * d.keys_dim
    if query.columns != key_width:
        query, key = mixing.repeat(query, key_width), mixing.repeat(key, key_width)
    query, key, value = op.cast(query, op.FLOAT), op.cast(key, op.FLOAT), op.cast(value, op.FLOAT)
    beta = op.cast(beta, op.FLOAT)
    query, key = _unit(query), _unit(key)
    query = op.pointwise(query, saves=False)
    query, key, value = (op.pointwise(t, saves=False) for t in (query, key, value))  # padded to whole chunks
    v_beta, k_beta = op.mul(value, beta), op.mul(key, beta)
    side = heads * CHUNK
    pairs = _between(decay, side)
    system = op.mul(mixing.product(k_beta, key, side), pairs)
    inside = op.mul(mixing.product(query, key, side), pairs)
    decayed = op.mul(k_beta, op.saved_result(decay))
    values, sunk = mixing.solved(system, v_beta), mixing.solved(system, decayed)
    query, key = op.mul(query, op.saved_result(decay)), op.mul(key, op.saved_result(decay))
    return mixing.scan(values, sunk, query, key, inside, heads * d.keys_dim * d.head_dim // CHUNK)


def _unit(x: Value) -> Value:
    """l2norm over a head."""
    return op.mul(x, op.saved_result(op.summed(op.mul(x, x))))


def _between(decay: Value, side: int) -> Value:
    """Decays between the rows of a chunk: a difference, masked, its exponential."""
    tape, rows, columns = decay.storage.tape, decay.rows, decay.columns
    out = tape.new(rows, side, op.FLOAT)
    out = tape.record(out, [decay], lambda g: [tape.new(rows, columns, op.FLOAT)])
    return op.saved_result(op.pointwise(out, saves=False))


def _gated_norm(x: Value, gate: Value, heads: int, tuned: Tuned) -> Value:
    rows, columns, width = x.rows, x.columns, x.width
    x = op.view(rms_norm(op.view(x, times(rows, heads), columns // heads), tuned), rows, columns)
    x = op.mul(x, op.pointwise(op.cast(gate, op.FLOAT), saves=True))
    return op.cast(x, width)
