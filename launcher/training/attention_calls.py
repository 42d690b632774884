"""One variable-length attention call: a range of query rows and a range of key rows an entry, in packed rows.

Documents that share a prefix, without a copy of its keys for each, make two calls: every segment with itself, causal,
and the documents' rows of each group with the rows of its prefix, whole.

Shapes: T packed rows, E entries of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Rows = tuple[int, int]  # begin, end


@dataclass(frozen=True, slots=True)
class Call:
    """Entry e has the query rows cu_q[e] to cu_q[e + 1] and the key rows cu_k[e] to cu_k[e + 1]; either may be empty.

    Rows of queries that no entry gives keys have no output, rows of keys that no entry gives queries no gradient.
    """

    cu_q: torch.Tensor  # [E + 1] int32
    cu_k: torch.Tensor  # [E + 1] int32; the very cu_q where queries are their own keys
    max_q: int
    max_k: int
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # a kernel's, alike in all layers

    @property
    def square(self) -> bool:
        """Whether queries are their own keys."""
        return self.cu_q is self.cu_k

    def to(self, device: torch.device, non_blocking: bool = False) -> Call:
        """The same on a device."""
        cu_q = self.cu_q.to(device, non_blocking=non_blocking)
        cu_k = cu_q if self.square else self.cu_k.to(device, non_blocking=non_blocking)
        return Call(cu_q, cu_k, self.max_q, self.max_k)


@dataclass(frozen=True, slots=True)
class Shared:
    """Documents with their groups' prefixes. Rows in `call`, `documents` and `prefixes` count from where `queries` and
    `keys` begin: the least ranges of packed rows that have them all."""

    queries: Rows
    keys: Rows
    call: Call  # the documents of a group, one entry, with its prefix
    documents: torch.Tensor  # int32 rows that attend to a prefix
    prefixes: torch.Tensor  # int32 rows of the prefixes

    def to(self, device: torch.device, non_blocking: bool = False) -> Shared:
        """The same on a device."""
        documents, prefixes = (t.to(device, non_blocking=non_blocking) for t in (self.documents, self.prefixes))
        return Shared(self.queries, self.keys, self.call.to(device, non_blocking), documents, prefixes)


def make_shared(queries: Sequence[Rows], prefixes: Sequence[Rows]) -> Shared | None:
    """The call of documents with their prefixes, given each segment's own rows and its prefix's (empty: none).

    None where no segment has a prefix, or where prefixes do not lie in the order of their documents: key rows only
    ascend in a call.
    """
    pairs = _groups(queries, prefixes)
    sides = tuple(zip(*pairs, strict=True))
    if not pairs or any(a[1] > b[0] for side in sides for a, b in zip(side, side[1:], strict=False)):
        return None
    first, last = pairs[0], pairs[-1]
    documents, keys = ([(begin - side[0][0], end - side[0][0]) for begin, end in side] for side in sides)
    return Shared(
        queries=(first[0][0], last[0][1]),
        keys=(first[1][0], last[1][1]),
        call=_call(documents, keys),
        documents=_rows(documents),
        prefixes=_rows(keys),
    )


def _groups(queries: Sequence[Rows], prefixes: Sequence[Rows]) -> list[tuple[Rows, Rows]]:
    """(rows of documents that lie together, rows of the prefix that they share)."""
    pairs: list[tuple[Rows, Rows]] = []
    for own, prefix in zip(queries, prefixes, strict=True):
        if prefix[0] == prefix[1]:
            continue
        if pairs and pairs[-1][1] == prefix and pairs[-1][0][1] == own[0]:
            pairs[-1] = ((pairs[-1][0][0], own[1]), prefix)
        else:
            pairs.append((own, prefix))
    return pairs


def _call(queries: Sequence[Rows], keys: Sequence[Rows]) -> Call:
    """Rows between the ranges become entries without keys or without queries: bounds are cumulative."""
    cu_q, cu_k = [0], [0]

    def entry(end_q: int, end_k: int) -> None:
        if (end_q, end_k) != (cu_q[-1], cu_k[-1]):
            cu_q.append(end_q)
            cu_k.append(end_k)

    for of_queries, of_keys in zip(queries, keys, strict=True):
        entry(of_queries[0], cu_k[-1])
        entry(cu_q[-1], of_keys[0])
        entry(of_queries[1], of_keys[1])
    max_q, max_k = (max(end - begin for begin, end in side) for side in (queries, keys))
    return Call(_int32(cu_q), _int32(cu_k), max_q, max_k)


def _rows(ranges: Sequence[Rows]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.arange(*rows, dtype=np.int32) for rows in ranges]))


def _int32(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
