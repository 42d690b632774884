"""Parts that several layers share: linear layers with adapters, norms, rotary positions (see `decoder`)."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.planning.shapes import Linears
from launcher.planning.tape import operations as op
from launcher.planning.tape.recorder import Value, form, times

TOKENS, KEYS, VISUAL = form(tokens=1), form(keys=1), form(visual=1)
PATCHES, FEATURES = form(patches=1), form(features=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """How the linear layers of a part train."""

    whole: bool  # every weight trains
    adapted: frozenset[str]  # names of linear layers inside a layer that have adapters
    r: int
    dropout: bool
    dora: bool
    four_bit: bool


def linear(x: Value, name: str, linears: Linears, tuned: Tuned) -> Value:
    """A linear layer with its adapter (peft, tuners/lora/layer.py and bnb.py)."""
    columns = linears[name][1]
    unpacked = x.width if tuned.four_bit else 0
    result = op.linear(x, columns, trains=tuned.whole, unpacked=unpacked)
    if name not in tuned.adapted:
        return result
    if tuned.four_bit:
        result = op.contiguous(result)
    if tuned.dora:
        return _dora(x, result, columns, tuned, unpacked)
    inner = op.dropout(x) if tuned.dropout else x
    inner = op.linear(inner, tuned.r, trains=True)
    return op.add(result, op.pointwise(op.linear(inner, columns, trains=True), saves=False))


def _dora(x: Value, result: Value, columns: int, tuned: Tuned, unpacked: int) -> Value:
    """peft's DoRA: the base layer's result is scaled too; with dropout it is computed again."""
    base = result
    if tuned.dropout:
        x = op.dropout(x)
    inner = op.linear(op.linear(x, tuned.r, trains=True), columns, trains=True)
    if tuned.dropout:
        base = op.linear(x, columns, trains=False, unpacked=unpacked)
    found = op.weigh(base, trains=True)
    found = op.add(found, op.pointwise(op.weigh(inner, trains=True), saves=False))
    return op.add(result, found)


def rms_norm(x: Value, tuned: Tuned, *, zero_centred: bool = False) -> Value:
    """RMSNorm computes in float32, and keeps its input in float32."""
    wide = op.cast(x, op.FLOAT)
    wide = op.mul(wide, op.saved_result(op.pointwise(op.mean(op.square(wide)), saves=False)))
    if zero_centred:
        return op.cast(op.weigh(wide, trains=tuned.whole), x.width)
    return op.weigh(op.cast(wide, x.width), trains=tuned.whole)


def rotate(x: Value, turning: int) -> Value:
    """Rotary positions: x * cos + rotate_half(x) * sin. `turning` columns of x turn, all but for Qwen3.5."""
    cosine = Value(x.storage.tape.new(form(), 0, 0).storage, x.rows, 0, x.width)  # all layers' own: counted once
    part, rest = (x, None) if turning == x.columns else (op.narrow(x, turning), op.narrow(x, x.columns - turning))
    straight = op.mul(part, cosine)
    left, right = op.narrow(part, turning // 2), op.narrow(part, turning // 2)
    out = op.add(straight, op.mul(op.cat(op.pointwise(right, saves=False), left), cosine))
    return out if rest is None else op.cat(out, rest)


def swiglu(x: Value, prefix: str, linears: Linears, tuned: Tuned) -> Value:
    """down(silu(gate(x)) * up(x))."""
    gate = op.pointwise(linear(x, f"{prefix}.gate_proj", linears, tuned), saves=True)
    inner = op.mul(gate, linear(x, f"{prefix}.up_proj", linears, tuned))
    del gate
    return linear(inner, f"{prefix}.down_proj", linears, tuned)


def head_norm(x: Value, heads: int, tuned: Tuned, *, zero_centred: bool = False) -> Value:
    """RMSNorm of each head."""
    rows, columns = x.rows, x.columns
    x = op.view(x, times(rows, heads), columns // heads)
    return op.view(rms_norm(x, tuned, zero_centred=zero_centred), rows, columns)
