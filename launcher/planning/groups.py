"""Linear layers of a decoder layer that the fused functions join, with the ranks of their adapters."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from launcher.kernels import padded_rank, row_stride
from launcher.planning.models import lora_modules
from launcher.planning.shapes import Shape
from launcher.spec import TuneConfig

MEMBERS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Linear layers of the same input."""

    inner: int
    outer: int  # of all results side by side
    rank: int  # of all adapters together, padded

    @property
    def beside(self) -> int:
        """Numbers that lie beside the weights where adapters have a place there."""
        return (self.outer + self.rank) * row_stride(self.inner, self.rank) - self.outer * self.inner


@functools.lru_cache(maxsize=256)  # hundreds of settings of one model are weighed for a plan
def groups(shape: Shape, tune: TuneConfig) -> tuple[dict[str, Group], ...]:
    """Of every decoder layer, by the names of MEMBERS."""
    adapted = set(lora_modules(shape, tune))
    return tuple(_layer(shape, tune.r, adapted, n) for n in range(shape.layers))


def layer_elements(shape: Shape, tune: TuneConfig) -> int:
    """Weights of a decoder layer's linear layers, which ZeRO-3 gathers together."""
    return sum(group.inner * group.outer for group in groups(shape, tune)[0].values())


def _layer(shape: Shape, r: int, adapted: set[str], number: int) -> dict[str, Group]:
    linears, prefix = shape.decoder(number), f"{shape.family.language}.layers.{number}."
    found = {}
    for name, members in MEMBERS.items():
        ranks = r * sum(prefix + member in adapted for member in members)
        found[name] = Group(
            inner=linears[members[0]][0],
            outer=sum(linears[member][1] for member in members),
            rank=padded_rank(ranks),
        )
    return found
