"""The layers of the families' models written down for a `tape`: the same operations, in the same order, with the same
local variables as transformers' own (5.24; src/transformers/models/*/modeling_*.py)."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.planning.shapes import Experts, Linears, Shape
from launcher.planning.tape import mixing
from launcher.planning.tape import operations as op
from launcher.planning.tape.delta import delta_net, gated_attention
from launcher.planning.tape.parts import KEYS, TOKENS, VISUAL, Tuned, head_norm, linear, rms_norm, rotate, swiglu
from launcher.planning.tape.recorder import Tape, Value, times


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How attention sees a micro-batch."""

    way: str  # own | gathered | cascade: where prefixes are shared (launcher.training.attention_ways)
    padded: bool = False  # segments are padded, for want of a flash kernel
    package: bool = False  # a flash-attn package, which keeps gathered keys and values
    kernel: str = "varlen"  # of launcher.training.attention


def attention(x: Value, shape: Shape, linears: Linears, tuned: Tuned, packing: Packing) -> Value:
    """Attention of a decoder layer over packed rows (launcher.training.attention)."""
    f = shape.family
    query = linear(x, "self_attn.q_proj", linears, tuned)
    if f.qk_norm:
        query = head_norm(query, shape.heads, tuned)
    key = linear(x, "self_attn.k_proj", linears, tuned)
    if f.qk_norm:
        key = head_norm(key, shape.kv_heads, tuned)
    value = linear(x, "self_attn.v_proj", linears, tuned)
    query, key = rotate(query, query.columns), rotate(key, key.columns)
    rows = op.first(query), op.first(key), op.first(value)
    out = packed_attention(*rows, shape.heads, packing)
    return linear(out, "self_attn.o_proj", linears, tuned)


def packed_attention(q: Value, k: Value, v: Value, heads: int, packing: Packing) -> Value:
    """launcher.training.attention: of rows [T, n d]."""
    if packing.padded:
        return mixing.padded_attention(q, k, v, heads, TOKENS if packing.way == "own" else KEYS)
    if packing.package:
        if packing.way != "own":
            k, v = mixing.gathered(k), mixing.gathered(v)
        return mixing.flash(q, k, v, heads)
    return mixing.flash(q, k, v, heads, way=packing.way, kernel=packing.kernel)


def router(x: Value, experts: Experts, tuned: Tuned) -> Value:
    """Weights of each token's experts."""
    logits = op.linear(x, experts.count, trains=tuned.whole)
    chosen = op.largest(op.saved_result(op.widened(logits)), experts.active)
    return op.cast(op.mul(chosen, op.summed(chosen)), x.width)


def sparse(x: Value, shape: Shape, tuned: Tuned) -> Value:
    """Experts by a grouped product: tokens are copied once for each of their experts, in the experts' order.

    transformers, integrations/moe.py: grouped_mm_experts_forward.
    """
    e, tape = shape.experts, x.storage.tape
    assert e is not None
    weights = router(x, e, tuned)
    rows = times(TOKENS, e.active)
    order = tape.new(rows, 1, op.LONG), tape.new(rows, 1, op.LONG)  # experts' numbers, and the permutation
    chosen = op.take(x, rows, tape.new(rows, 1, op.LONG))
    weights = op.take(op.view(weights, rows, 1), rows, order[1])
    both = op.linear(chosen, 2 * e.intermediate, trains=tuned.whole, copies=e.count)
    gate, up = op.split(both, e.intermediate, e.intermediate)
    both = op.mul(op.pointwise(gate, saves=True), up)
    both = op.linear(both, shape.hidden, trains=tuned.whole, copies=e.count)
    out = op.mul(both, weights)
    back = tape.new(rows, 1, op.LONG)
    out = op.take(out, rows, back)
    return op.total_of(out, TOKENS)


def feed_forward(x: Value, shape: Shape, linears: Linears, tuned: Tuned) -> Value:
    """The second half of a decoder layer."""
    e = shape.experts
    if e is None:
        return swiglu(x, "mlp", linears, tuned)
    if not e.shared:
        return sparse(x, shape, tuned)
    shared = swiglu(x, "mlp.shared_expert", linears, tuned)
    found = sparse(x, shape, tuned)
    gate = op.saved_result(linear(x, "mlp.shared_expert_gate", linears, tuned))
    return op.add(found, op.mul(shared, gate))


def decoder_layer(x: Value, shape: Shape, linears: Linears, tuned: Tuned, packing: Packing) -> Value:
    """A decoder layer."""
    centred = shape.family.recurrent
    residual = x
    x = rms_norm(x, tuned, zero_centred=centred)
    if "linear_attn.out_proj" in linears:
        x = delta_net(x, shape, linears, tuned)
    elif centred:
        x = gated_attention(x, shape, linears, tuned)
    else:
        x = attention(x, shape, linears, tuned, packing)
    x = op.add(residual, x)
    residual = x
    x = rms_norm(x, tuned, zero_centred=centred)
    x = feed_forward(x, shape, linears, tuned)
    return op.add(residual, x)


def embed_tokens(merged: Value | None, shape: Shape, tape: Tape, width: int, *, trains: bool) -> Value:
    """Embeddings of a micro-batch, images in place (launcher.training.backbone.hidden_states)."""
    x = op.embedding(tape, TOKENS, shape.vocab, shape.hidden, width, trains=trains)
    if merged is not None:
        x = op.put(x, op.take(merged, VISUAL))
    return op.take(x, TOKENS) if shape.family.recurrent else x  # every document a padded row


def last_hidden(x: Value, shape: Shape, tuned: Tuned) -> Value:
    """The last hidden states, packed again where documents were padded rows."""
    if not shape.family.recurrent:
        return op.first(rms_norm(x, tuned))
    x = op.take(rms_norm(x, tuned, zero_centred=True), TOKENS)
    return op.put(x.storage.tape.new(TOKENS, x.columns, x.width), x)
