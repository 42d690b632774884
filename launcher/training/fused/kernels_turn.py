"""Norm by head and rotary embedding in Triton; launcher.training.fused.kernels_rotate starts these.

A program takes some rows of some heads of one kind, as two halves of each head, so that turning needs no exchange
between threads. Of `cos` and `sin` only the first half is read: rotary embeddings repeat it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from launcher.training.fused.kernels_common import dot, load, load_b


@triton.jit(do_not_specialize=["tokens"])
def rotate_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q,
    k,
    weight_q,
    weight_k,
    cos,
    sin,
    qkv_row,
    cos_row,
    sin_row,
    eps,
    h_ptr,
    b_ptr,
    h_row,
    b_row,
    b_rank,
    tokens,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program: some rows of heads of queries, of keys or, with a product of low rank, of values."""
    across: tl.constexpr = (QUERIES + (2 * KEYS if RANK > 0 else KEYS)) // GROUP
    first = tl.program_id(0) // across * ROWS
    head = tl.program_id(0) % across * GROUP
    # fmt: off
    if head < QUERIES:
        _turn(qkv, q, weight_q, cos, sin, qkv_row, QUERIES * D, cos_row, sin_row, eps, h_ptr, b_ptr, h_row, b_row,
              b_rank, first, tokens, head, head, D, HALF, GROUP, True, NORM, RANK, RANKS, ROWS)
    elif head < QUERIES + KEYS:
        _turn(qkv, k, weight_k, cos, sin, qkv_row, KEYS * D, cos_row, sin_row, eps, h_ptr, b_ptr, h_row, b_row,
              b_rank, first, tokens, head, head - QUERIES, D, HALF, GROUP, True, NORM, RANK, RANKS, ROWS)
    else:
        _turn(qkv, qkv, weight_k, cos, sin, qkv_row, qkv_row, cos_row, sin_row, eps, h_ptr, b_ptr, h_row, b_row,
              b_rank, first, tokens, head, head, D, HALF, GROUP, False, False, RANK, RANKS, ROWS)
    # fmt: on


@triton.jit
def _halves(place, other, inside):  # type: ignore[no-untyped-def]
    return tl.load(place, mask=inside, other=0.0), tl.load(place + other, mask=inside, other=0.0)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    qkv,
    out,
    weight,
    cos,
    sin,
    qkv_row,
    out_row,
    cos_row,
    sin_row,
    eps,
    h_ptr,
    b_ptr,
    h_row,
    b_row,
    b_rank,
    first,
    tokens,
    head,
    to_head,
    D: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Heads from `head` on of qkv to those from `to_head` on of `out`; while one is computed the next is on its way."""
    other: tl.constexpr = D // 2
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)
    in_cols, wide = cols < other, first.to(tl.int64)
    inside = (rows < tokens - first) & in_cols[None, :]
    place = qkv + wide * qkv_row + head * D + rows * qkv_row + cols[None, :]
    to = out + wide * out_row + to_head * D + rows * out_row + cols[None, :]
    one, two = _halves(place, other, inside)
    if TURN:
        c = load(cos, cos_row, first, rows * cos_row + cols[None, :], inside).to(tl.float32)
        s = load(sin, sin_row, first, rows * sin_row + cols[None, :], inside).to(tl.float32)
    if RANK > 0:
        ranks = tl.arange(0, RANKS)[None, :]
        h = load(h_ptr, h_row, first, rows * h_row + ranks, (rows < tokens - first) & (ranks < RANK))
        b_ptr += head * D * b_row
        b = load_b(b_ptr, b_row, b_rank, cols, in_cols, RANK, RANKS)
        b_two = load_b(b_ptr, b_row, b_rank, cols + other, in_cols, RANK, RANKS)
    if NORM:
        scale, scale_two = _halves(weight + cols[None, :], other, in_cols[None, :])
    for i in range(GROUP):
        this, this_two = one.to(tl.float32), two.to(tl.float32)
        more = i + 1 < GROUP
        place += D
        one, two = _halves(place, other, inside & more)
        if RANK > 0:
            this += dot(h, b)
            this_two += dot(h, b_two)
            b_ptr += D * b_row
            b = load_b(b_ptr, b_row, b_rank, cols, in_cols & more, RANK, RANKS)
            b_two = load_b(b_ptr, b_row, b_rank, cols + other, in_cols & more, RANK, RANKS)
        if NORM:
            inverse = tl.rsqrt(tl.sum(this * this + this_two * this_two, axis=1) / D + eps)[:, None]
            this *= inverse * scale.to(tl.float32)
            this_two *= inverse * scale_two.to(tl.float32)
        if TURN:
            turned = this * c - this_two * s
            this_two = this_two * c + this * s
            this = turned
        tl.store(to, this.to(out.dtype.element_ty), mask=inside)
        tl.store(to + other, this_two.to(out.dtype.element_ty), mask=inside)
        to += D


@triton.jit(do_not_specialize=["tokens"])
def rotate_backward_kernel(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    qkv,
    dqkv,
    weight_q,
    weight_k,
    cos,
    sin,
    dq_row,
    dq_head,
    dk_row,
    dk_head,
    dv_row,
    dv_head,
    qkv_row,
    cos_row,
    sin_row,
    dqkv_row,
    eps,
    h_ptr,
    b_ptr,
    h_row,
    b_row,
    b_rank,
    tokens,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program: some rows of heads of queries, of keys or of values."""
    across: tl.constexpr = (QUERIES + 2 * KEYS) // GROUP
    first = tl.program_id(0) // across * ROWS
    head = tl.program_id(0) % across * GROUP
    # fmt: off
    if head < QUERIES:
        _turn_back(dq, qkv, dqkv, weight_q, cos, sin, dq_row, dq_head, qkv_row, dqkv_row, cos_row, sin_row, eps, h_ptr,
                   b_ptr, h_row, b_row, b_rank, first, tokens, head, head, D, HALF, GROUP, True, NORM, RANK, RANKS,
                   ROWS)
    elif head < QUERIES + KEYS:
        _turn_back(dk, qkv, dqkv, weight_k, cos, sin, dk_row, dk_head, qkv_row, dqkv_row, cos_row, sin_row, eps, h_ptr,
                   b_ptr, h_row, b_row, b_rank, first, tokens, head, head - QUERIES, D, HALF, GROUP, True, NORM, RANK,
                   RANKS, ROWS)
    else:
        _turn_back(dv, qkv, dqkv, weight_k, cos, sin, dv_row, dv_head, qkv_row, dqkv_row, cos_row, sin_row, eps, h_ptr,
                   b_ptr, h_row, b_row, b_rank, first, tokens, head, head - QUERIES - KEYS, D, HALF, GROUP, False,
                   False, 0, 0, ROWS)
    # fmt: on


@triton.jit
def _turn_back(  # type: ignore[no-untyped-def]
    given,
    qkv,
    dqkv,
    weight,
    cos,
    sin,
    given_row,
    given_head,
    qkv_row,
    out_row,
    cos_row,
    sin_row,
    eps,
    h_ptr,
    b_ptr,
    h_row,
    b_row,
    b_rank,
    first,
    tokens,
    head,
    from_head,
    D: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of heads from `head` on of qkv, from those from `from_head` on of `given`."""
    other: tl.constexpr = D // 2
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)
    in_cols, wide = cols < other, first.to(tl.int64)
    inside = (rows < tokens - first) & in_cols[None, :]
    source = given + wide * given_row + from_head * given_head + rows * given_row + cols[None, :]
    place = qkv + wide * qkv_row + head * D + rows * qkv_row + cols[None, :]
    to = dqkv + wide * out_row + head * D + rows * out_row + cols[None, :]
    one, two = _halves(source, other, inside)
    if NORM:
        raw, raw_two = _halves(place, other, inside)
        scale, scale_two = _halves(weight + cols[None, :], other, in_cols[None, :])
    if TURN:
        c = load(cos, cos_row, first, rows * cos_row + cols[None, :], inside).to(tl.float32)
        s = load(sin, sin_row, first, rows * sin_row + cols[None, :], inside).to(tl.float32)
    if RANK > 0:
        ranks = tl.arange(0, RANKS)[None, :]
        h = load(h_ptr, h_row, first, rows * h_row + ranks, (rows < tokens - first) & (ranks < RANK))
        b_ptr += head * D * b_row
        b = load_b(b_ptr, b_row, b_rank, cols, in_cols, RANK, RANKS)
        b_two = load_b(b_ptr, b_row, b_rank, cols + other, in_cols, RANK, RANKS)
    for i in range(GROUP):
        this, this_two = one.to(tl.float32), two.to(tl.float32)
        more = i + 1 < GROUP
        source += given_head
        one, two = _halves(source, other, inside & more)
        if TURN:
            turned = this * c + this_two * s
            this_two = this_two * c - this * s
            this = turned
        if NORM:
            unit, unit_two = raw.to(tl.float32), raw_two.to(tl.float32)
            place += D
            raw, raw_two = _halves(place, other, inside & more)
            if RANK > 0:
                unit += dot(h, b)
                unit_two += dot(h, b_two)
                b_ptr += D * b_row
                b = load_b(b_ptr, b_row, b_rank, cols, in_cols & more, RANK, RANKS)
                b_two = load_b(b_ptr, b_row, b_rank, cols + other, in_cols & more, RANK, RANKS)
            this *= scale.to(tl.float32)
            this_two *= scale_two.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(unit * unit + unit_two * unit_two, axis=1) / D + eps)[:, None]
            mean = tl.sum(this * unit + this_two * unit_two, axis=1)[:, None] * inverse * inverse / D
            this = inverse * (this - unit * mean)
            this_two = inverse * (this_two - unit_two * mean)
        tl.store(to, this.to(dqkv.dtype.element_ty), mask=inside)
        tl.store(to + other, this_two.to(dqkv.dtype.element_ty), mask=inside)
        to += D
