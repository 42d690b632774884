"""Linear layers of a decoder layer as the fused functions see them: frozen or trained weight, adapter or none.

Several that share their input are joined: one product where their weights lie one behind another in memory, and
adapters stacked into one pair of thin matrices. Frozen weights that stay where they are share an allocation with copies
of their adapters:

    [ W  sB ]   [D + R, K + R]
    [ A     ]

so that one product takes both: of [x, x A'] with the upper part on the way there, of [dy, dy sB] with the left part on
the way back. Adding an adapter's product afterwards would walk over the whole result once more.

Shapes: T tokens, K inputs, D outputs of all members, R ranks of their adapters, padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from launcher.kernels import INLINE_RANKS, padded_rank, row_stride
from launcher.training.fused.ops import Low, new_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One linear layer; parameters are looked up when needed, since ZeRO-3 exchanges what they hold."""

    base: Any  # nn.Linear, or bitsandbytes' Linear4bit
    down: Any = None  # peft's lora_A, lora_B: nn.Linear
    up: Any = None
    scale: float = 1.0

    @property
    def weight(self) -> Tensor:
        """[D, K] in the run's precision."""
        weight = self.base.weight
        if hasattr(weight, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            return dequantize_4bit(weight.data, weight.quant_state).to(self.base.compute_dtype)  # type: ignore[no-any-return]
        return weight.detach()  # type: ignore[no-any-return]

    def parameters(self) -> list[Any]:
        """Weight, bias, A and B; None for what does not exist or does not train."""
        adapter = (self.down.weight, self.up.weight) if self.down is not None else (None, None)
        found = (self.base.weight, self.base.bias, *adapter)
        return [p if p is not None and p.requires_grad else None for p in found]


def projection_of(module: Any) -> Projection | None:
    """A linear layer, bare or with one of peft's plain LoRA adapters; None for anything else."""
    if not hasattr(module, "base_layer"):
        return Projection(base=module) if _is_linear(module) else None
    names = list(module.lora_A)
    plain = len(names) == 1 and not module.lora_magnitude_vector
    if not plain or not isinstance(module.lora_dropout[names[0]], nn.Identity):
        return None
    if not _is_linear(module.base_layer) or module.merged:
        return None
    name = names[0]
    return Projection(
        base=module.base_layer, down=module.lora_A[name], up=module.lora_B[name], scale=float(module.scaling[name])
    )


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Linear4bit"


class Place(NamedTuple):
    """Where an adapter's copies lie, beside weights that lie together."""

    a: Tensor
    of_a: Tensor  # the copy
    b: Tensor
    of_b: Tensor  # the copy, times the scale
    scale: float


class Joined:
    """Projections of the same input."""

    def __init__(self, *members: Projection) -> None:
        self.members = members
        self.inputs = int(members[0].base.in_features)
        self.ends = [0, *accumulate(int(member.base.out_features) for member in members)]
        self.outputs = self.ends[-1]
        self.rank_ends = [0, *accumulate(0 if m.down is None else int(m.down.out_features) for m in members)]
        self.rank = padded_rank(self.rank_ends[-1])
        self.together: Tensor | None = None  # [D + R, K + R], once `lay_together` was called
        self.places: list[Place] = []  # of adapters there

    @property
    def spare(self) -> int:
        """Columns that a product with adapters needs beside its input's, and beside its result's on the way back."""
        return self.rank if self.together is not None else 0

    def parameters(self) -> list[Any]:
        """Those of every member, in `Projection.parameters`' order."""
        return [parameter for member in self.members for parameter in member.parameters()]

    @property
    def trains_weights(self) -> bool:
        """Whether some member's whole weight trains."""
        return any(member.base.weight.requires_grad for member in self.members)

    def lay_together(self) -> None:
        """Move frozen weights into one allocation with room for their adapters; weights that train stay."""
        weights = [member.base.weight for member in self.members]
        if any(w.requires_grad or hasattr(w, "quant_state") for w in weights) or len({w.dtype for w in weights}) > 1:
            return
        stride = row_stride(self.inputs, self.rank)
        together = weights[0].new_zeros(self.outputs + self.rank, stride)[:, : self.inputs + self.rank]
        for weight, begin, end in zip(weights, self.ends, self.ends[1:], strict=False):
            place = together[begin:end, : self.inputs]
            place.copy_(weight.data)
            weight.data = place
        self.together = together
        of_a, of_b = together[self.outputs :, : self.inputs], together[: self.outputs, self.inputs :]
        for i, m in enumerate(self.members):
            if m.down is not None:
                rows = of_a[self.rank_ends[i] : self.rank_ends[i + 1]]
                self.places.append(Place(m.down.weight, rows, m.up.weight, self._block(of_b, i), m.scale))

    def forward(self, x: Tensor) -> tuple[Tensor, Low | None, Tensor | None]:
        """(x [T, K] times the weights, plus biases [T, D], what adapters add and is not added yet, x A' [T, R]).

        Adapters are added where weights lie together with them: x is copied if it has no spare columns. The result has
        `spare` columns.
        """
        h = torch.mm(x, self.a().T) if self.rank else None
        out = new_rows(x, self.outputs, self.spare)
        added = self.spare > 0 and len(x) > 0
        if h is not None and added:
            x = x if self._is_wide(x) else new_rows(x, self.inputs, self.spare).copy_(x)
            torch.mm(_widened(x, h), self._upper().T, out=out)
        elif (weight := self._weight()) is not None:
            torch.mm(x, weight.T, out=out)
        else:
            for member, begin, end in zip(self.members, self.ends, self.ends[1:], strict=False):
                torch.mm(x, member.weight.T, out=out[:, begin:end])
        for member, begin, end in zip(self.members, self.ends, self.ends[1:], strict=False):
            if member.base.bias is not None:
                out[:, begin:end] += member.base.bias
        low = None if h is None or added else Low(h, self.b())
        if low is not None and self.rank > INLINE_RANKS:
            out.addmm_(low.h, low.b.T)
            low = None
        return out, low, h

    def low(self, h: Tensor | None) -> Low | None:
        """What `forward` left to be added, from the x A' that it gave: for the same pass on the way back."""
        inline = h is not None and self.together is None and self.rank <= INLINE_RANKS
        return Low(h, self.b()) if inline and h is not None else None

    def backward_input(self, dy: Tensor, g: Tensor | None) -> Tensor:
        """Gradient of the input [T, K] from dy [T, D] and g = dy B [T, R]."""
        if g is not None and self._is_wide(dy):
            return torch.mm(_widened(dy, g), self._left())
        if (weight := self._weight()) is not None:
            out = torch.mm(dy, weight)
        else:
            pieces = zip(self.members, self.ends, self.ends[1:], strict=False)
            first, begin, end = next(pieces)
            out = torch.mm(dy[:, begin:end], first.weight)
            for member, begin, end in pieces:
                out.addmm_(dy[:, begin:end], member.weight)
        return out if g is None else out.addmm_(g, self.a())

    def gradients(self, dy: Tensor, h: Tensor | None, da: Tensor | None, x: Tensor | None) -> list[Tensor | None]:
        """Gradients in the order of `parameters`, None for what does not train.

        dy [T, D], h [T, R] = x A', da [R, K] the gradient of the stacked A; x [T, K] only where weights train. Those of
        weights that all train are parts of one tensor.
        """
        db = None if h is None else torch.mm(dy.T, h)
        together = all(member.base.weight.requires_grad for member in self.members)
        dw = torch.mm(dy.T, x) if together and x is not None else None
        found: list[Tensor | None] = []
        for i, member in enumerate(self.members):
            begin, end = self.ends[i], self.ends[i + 1]
            weight, bias, a, b = member.parameters()
            if dw is not None:
                found.append(dw[begin:end])
            else:
                found.append(None if weight is None or x is None else torch.mm(dy[:, begin:end].T, x))
            found.append(None if bias is None else dy[:, begin:end].sum(dim=0))
            found.append(None if a is None or da is None else da[self.rank_ends[i] : self.rank_ends[i + 1]])
            found.append(None if b is None or db is None else self._block(db, i) * member.scale)
        return found

    def a(self) -> Tensor:
        """Adapters' A one below another, [R, K]; rows that pad are zeros."""
        if self.together is not None:
            return self.together[self.outputs :, : self.inputs]
        parts = [m.down.weight.detach() for m in self.members if m.down is not None]
        if missing := self.rank - self.rank_ends[-1]:
            parts.append(parts[0].new_zeros(missing, self.inputs))
        return torch.cat(parts)

    def b(self) -> Tensor:
        """Adapters' B with their scales along the diagonal, [D, R]."""
        if self.together is not None:
            return self.together[: self.outputs, self.inputs :]
        first = next(m.up.weight for m in self.members if m.up is not None)
        out = first.new_zeros(self.outputs, self.rank)
        for i, member in enumerate(self.members):
            if member.up is not None:
                torch.mul(member.up.weight.detach(), member.scale, out=self._block(out, i))
        return out

    def _block(self, of_b: Tensor, i: int) -> Tensor:
        """Member i's place in [D, R]."""
        return of_b[self.ends[i] : self.ends[i + 1], self.rank_ends[i] : self.rank_ends[i + 1]]

    def _upper(self) -> Tensor:
        """[D, K + R]."""
        assert self.together is not None
        return self.together[: self.outputs]

    def _left(self) -> Tensor:
        """[D + R, K]."""
        assert self.together is not None
        return self.together[:, : self.inputs]

    def _is_wide(self, x: Tensor) -> bool:
        """Whether x [T, ...] was made with this one's spare columns."""
        return self.spare > 0 and len(x) > 0 and x.stride(0) == row_stride(x.shape[1], self.spare)

    def _weight(self) -> Tensor | None:
        """[D, K] of all members where it exists without a copy."""
        if self.together is not None:
            return self.together[: self.outputs, : self.inputs]
        if len(self.members) == 1:
            return self.members[0].weight
        weights = [member.base.weight.detach() for member in self.members]
        if any(hasattr(member.base.weight, "quant_state") for member in self.members):
            return None
        for one, other in zip(weights, weights[1:], strict=False):
            if one.data_ptr() + one.nbytes != other.data_ptr() or not (one.is_contiguous() and other.is_contiguous()):
                return None
        first, last = weights[0], weights[-1]
        if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
            return None  # neighbours by chance
        return first.as_strided((self.outputs, self.inputs), (self.inputs, 1))


def _widened(x: Tensor, more: Tensor) -> Tensor:
    """x [T, D] and its spare columns [T, D + R], which become `more` [T, R]."""
    wide = x.as_strided((len(x), x.shape[1] + more.shape[1]), (x.stride(0), 1))
    wide[:, x.shape[1] :] = more
    return wide


def refresh(together: Iterable[Joined]) -> None:
    """Copy adapters beside the weights they belong to: optimizers change them, one after another, in place."""
    found = [place for joined in together for place in joined.places]
    if not found:
        return
    a, of_a, b, of_b, scales = (list(column) for column in zip(*found, strict=True))
    with torch.no_grad():
        torch._foreach_copy_(of_a, a)
        torch._foreach_copy_(of_b, torch._foreach_mul(b, scales))
