"""A Part in plain torch, entry by entry of a call, as slow and as clear as can be; in any precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from launcher.training.attention_calls import Call

Tensors = tuple[Tensor, Tensor, Tensor]


class PlainPart:
    """launcher.training.attention_ways.Part. What a call does not cover is not a number: nobody may use it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Of Part."""
        out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[:2], torch.nan)
        for rows, keys in entries(call):
            scores = scores_of(q[rows], k[keys], scale, causal)
            lse[rows] = scores.logsumexp(-1).T
            out[rows] = torch.einsum("nqk,knd->qnd", scores.softmax(-1), repeated(v[keys], q))
        return out, lse

    def backward(
        self, grad: Tensor, tensors: Tensors, out: Tensor, lse: Tensor, call: Call, scale: float, causal: bool
    ) -> Tensors:
        """Of Part: d scores = weights * (d weights - out . d out), with weights exp(score - lse)."""
        q, k, v = tensors
        dq, dk, dv = (torch.full_like(t, torch.nan) for t in tensors)
        for rows, keys in entries(call):
            weights = (scores_of(q[rows], k[keys], scale, causal) - lse[rows].T[..., None]).exp()
            dweights = torch.einsum("qnd,knd->nqk", grad[rows], repeated(v[keys], q))
            dscores = weights * (dweights - (grad[rows] * out[rows]).sum(-1).T[..., None]) * scale
            dq[rows] = torch.einsum("nqk,knd->qnd", dscores, repeated(k[keys], q))
            shape = (-1, k.shape[1], q.shape[1] // k.shape[1], k.shape[2])
            dk[keys] = torch.einsum("nqk,qnd->knd", dscores, q[rows]).reshape(shape).sum(2)
            dv[keys] = torch.einsum("nqk,qnd->knd", weights, grad[rows]).reshape(shape).sum(2)
        return dq, dk, dv


def entries(call: Call) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and of keys of each entry that has both."""
    bounds = [t.tolist() for t in (call.cu_q, call.cu_k)]
    assert all(b == sorted(b) for b in bounds) and len(bounds[0]) == len(bounds[1])
    for q, end_q, k, end_k in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        assert end_q - q <= call.max_q or k == end_k
        assert end_k - k <= call.max_k or q == end_q
        if q < end_q and k < end_k:
            yield slice(q, end_q), slice(k, end_k)


def scores_of(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """[n, Q, K]."""
    scores = torch.einsum("qnd,knd->nqk", q, repeated(k, q)) * scale
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    seen = seen.tril(len(k) - len(q)) if causal else seen
    return scores.masked_fill(~seen, -torch.inf)


def repeated(keys: Tensor, q: Tensor) -> Tensor:
    """A key head for every query head."""
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], dim=1)
