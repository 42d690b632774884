"""Which rows of a packed micro-batch attend to which, as tensors.

Shapes: T packed rows, S segments, K key rows of all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from launcher.training.attention_calls import Call, Rows, Shared, make_shared


@dataclass(frozen=True, slots=True)
class Padded:
    """Segments of like shape, padded to Q queries and K keys."""

    query_rows: torch.Tensor  # [S, Q]
    key_rows: torch.Tensor  # [S, K]
    mask: torch.Tensor  # [S, 1, Q, K] true = may attend
    real: torch.Tensor  # [S, Q] false = padding

    def to(self, device: torch.device, non_blocking: bool = False) -> Padded:
        """The same on a device."""
        return Padded(*(getattr(self, name).to(device) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rows attend to which, for all kinds of kernel.

    cu_q, cu_k, key_rows, max_q and max_k are of one call over gathered keys: a segment's are its prefix's and its own.
    """

    cu_q: torch.Tensor  # [S + 1] int32
    cu_k: torch.Tensor  # [S + 1] int32
    key_rows: torch.Tensor | None  # [K] rows to gather as keys; None: no segment has a prefix
    max_q: int
    max_k: int
    padded: tuple[Padded, ...] = ()  # CPU only
    shared: Shared | None = None  # segments with a prefix; None: there is none, or only key_rows can say where it is
    own: Call = field(init=False)  # every segment with itself
    whole: Call = field(init=False)  # every segment with all that it attends to, keys gathered

    def __post_init__(self) -> None:
        own = Call(self.cu_q, self.cu_q, self.max_q, self.max_q)
        object.__setattr__(self, "own", own)
        alone = self.key_rows is None
        object.__setattr__(self, "whole", own if alone else Call(self.cu_q, self.cu_k, self.max_q, self.max_k))

    def to(self, device: torch.device, non_blocking: bool = False) -> Layout:
        """The same on a device."""
        rows = None if self.key_rows is None else self.key_rows.to(device, non_blocking=non_blocking)
        return replace(
            self,
            cu_q=self.cu_q.to(device, non_blocking=non_blocking),
            cu_k=self.cu_k.to(device, non_blocking=non_blocking),
            key_rows=rows,
            padded=tuple(p.to(device) for p in self.padded),
            shared=None if self.shared is None else self.shared.to(device, non_blocking),
        )


def make_layout(queries: Sequence[Rows], prefixes: Sequence[Rows], *, padded: bool) -> Layout:
    """Layout of segments given each one's own rows and its prefix's rows (empty when begin == end)."""
    own = np.array([end - begin for begin, end in queries])
    before = np.array([end - begin for begin, end in prefixes])
    keys = [np.r_[p[0] : p[1], q[0] : q[1]] for q, p in zip(queries, prefixes, strict=True)]
    return Layout(
        cu_q=torch.from_numpy(np.concatenate([[0], np.cumsum(own)]).astype(np.int32)),
        cu_k=torch.from_numpy(np.concatenate([[0], np.cumsum(own + before)]).astype(np.int32)),
        key_rows=torch.from_numpy(np.concatenate(keys)) if before.any() else None,
        max_q=int(own.max()),
        max_k=int((own + before).max()),
        padded=_pad(queries, prefixes, keys) if padded else (),
        shared=None if padded else make_shared(queries, prefixes),
    )


def _pad(queries: Sequence[Rows], prefixes: Sequence[Rows], keys: Sequence[np.ndarray]) -> tuple[Padded, ...]:
    """Segments with and without a prefix apart: their shapes differ most."""
    kinds: dict[bool, list[int]] = {}
    for index, (begin, end) in enumerate(prefixes):
        kinds.setdefault(begin < end, []).append(index)
    out = []
    for members in kinds.values():
        length_q = max(queries[i][1] - queries[i][0] for i in members)
        length_k = max(len(keys[i]) for i in members)
        query_rows = np.zeros((len(members), length_q), np.int64)
        key_rows = np.zeros((len(members), length_k), np.int64)
        mask = np.zeros((len(members), length_q, length_k), bool)
        real = np.zeros((len(members), length_q), bool)
        for row, i in enumerate(members):
            own = queries[i][1] - queries[i][0]
            query_rows[row, :own] = np.arange(*queries[i])
            key_rows[row, : len(keys[i])] = keys[i]
            before = len(keys[i]) - own
            mask[row, :own, : len(keys[i])] = np.tri(own, len(keys[i]), before, dtype=bool)
            mask[row, own:, 0] = True  # a padding query must attend to something; its output is dropped
            real[row, :own] = True
        tensors = (torch.from_numpy(a) for a in (query_rows, key_rows, mask[:, None], real))
        out.append(Padded(*tensors))
    return tuple(out)
