"""A frozen vision tower's forward without a graph: transformers' own arithmetic in fewer passes over memory.

The mergers (the projector) may train: they are then called as they are, with a graph, on the blocks' outputs.

Shapes: P patches, V visual tokens (merged patches), H width of the tower, C width of the language model, n heads,
d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.families import Family
from launcher.kernels import without_triton
from launcher.training import vision_ops as ops
from launcher.training.attention import Layout
from launcher.training.media import Grid
from launcher.training.vision_tables import TableMaker, Tables, in_order

# q, k, v [P, n, d], a layout of frames or windows, scale -> [P, n, d]; not causal
Attend = Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]
Features = tuple[Tensor, list[Tensor]]  # merged [V, C], and those for the first layers of the language model

# Towers whose forward is the one below, by Family.tower, with the activation of their MLP.
KNOWN = {
    "qwen3": (
        "gelu_pytorch_tanh",
        ("Qwen3VLVisionModel", "Qwen3VLMoeVisionModel", "Qwen3_5VisionModel", "Qwen3_5MoeVisionModel"),
    ),
    "qwen2_5": ("silu", ("Qwen2_5_VisionTransformerPretrainedModel",)),
}


def why_plain(tower: Any, family: Family, *, shards: str | None = None) -> str | None:
    """Why a tower needs transformers' own forward, in words; None where the fast one may run.

    `shards`: where ZeRO-3 keeps its shards of the weights between uses (direct.offload_of), None without ZeRO-3.
    """
    activation, classes = KNOWN.get(str(family.tower), (None, ()))
    if type(tower).__name__ not in classes or tower.config.hidden_act != activation:
        return f"its class is {type(tower).__name__} with {tower.config.hidden_act}, which has no fast path"
    if shards == "nvme":
        return "ZeRO-3 reads weights from files into buffers for a few, and the fast path needs all at once"
    if shards is not None and any(parameter.requires_grad for parameter in tower.parameters()):
        return "ZeRO-3 finds gradients as modules are called"
    weight = next(tower.parameters())
    capability = torch.cuda.get_device_capability(weight.device) if weight.is_cuda else None
    if (old := without_triton(capability)) is not None:
        return old
    if any(p.requires_grad for name, p in tower.named_parameters() if "merger" not in name):
        return "it trains"
    if kinds := {type(m).__name__ for m in tower.blocks.modules() if isinstance(m, nn.Linear)} - {"Linear"}:
        return f"its linear layers are {', '.join(sorted(kinds))}"
    return None


class FrozenTower:
    """The forward of a tower of which `why_plain` says nothing."""

    def __init__(self, tower: Any, attend: Attend) -> None:
        self.tower, self.attend = tower, attend
        self.tables = TableMaker(tower)
        self.deep = list(getattr(tower, "deepstack_visual_indexes", ()))  # blocks with a merger of their own

    def __call__(self, pixels: Tensor, grids: Sequence[Grid]) -> Features:
        """The features of patches [P, values of a patch] in the weights' type."""
        tower = self.tower
        graph = torch.is_grad_enabled() and any(p.requires_grad for p in tower.parameters())
        deep: list[Tensor] = [torch.empty(0)] * len(self.deep)
        with torch.no_grad():
            tables = self.tables.of(grids)
            x, delta = self._patches(pixels, tables), None
            for number, block in enumerate(tower.blocks):
                delta = self._block(block, x, delta, tables, self._layout(number, tables))
                if number in self.deep:
                    x, delta = x.add_(delta), None
                    index = self.deep.index(number)
                    deep[index] = _merged(tower.deepstack_merger_list[index], x, graph)
            x = x if delta is None else x.add_(delta)
        merged = _merged(tower.merger, x, graph)
        return merged if tables.order is None else merged[tables.order.argsort()], deep

    def _patches(self, pixels: Tensor, tables: Tables) -> Tensor:
        """Embedded patches [P, H], fresh: the convolution takes each patch once, so it is a linear layer."""
        weight = self.tower.patch_embed.proj.weight.flatten(1).t()
        x = pixels @ weight if tables.places is None else tables.places.addmm_(pixels, weight)
        return x if tables.order is None else in_order(x, tables.order)

    def _layout(self, number: int, tables: Tables) -> Layout:
        windowed = tables.windowed is not None and number not in self.tower.fullatt_block_indexes
        return tables.windowed if windowed else tables.whole  # type: ignore[return-value]

    def _block(self, block: Any, x: Tensor, delta: Tensor | None, tables: Tables, layout: Layout) -> Tensor:
        """What a block's MLP adds; `delta` is what the one before added, and x [P, H] takes all but the last."""
        attention = block.attn
        qkv = _linear(ops.add_norm_(x, delta, block.norm1), attention.qkv).view(len(x), 3, attention.num_heads, -1)
        ops.turn_(qkv, tables.cos, tables.sin)
        q, k, v = qkv.unbind(1)
        mixed = self.attend(q, k, v, layout, attention.scaling)
        normed = ops.add_norm_(x, _linear(mixed.reshape(len(x), -1), attention.proj), block.norm2)
        mlp = block.mlp
        if hasattr(mlp, "gate_proj"):
            inner = ops.silu_times_(_linear(normed, mlp.gate_proj), _linear(normed, mlp.up_proj))
            return _linear(inner, mlp.down_proj)
        return _linear(ops.gelu_linear(normed, mlp.linear_fc1), mlp.linear_fc2)


def install(tower: Any, attend: Attend) -> None:
    """Have a module's own forward be the fast one: ZeRO-3 gathers weights where a module is called.

    Before models.mark_leaves, which has it gather those of the whole tower at once.
    """
    tower.fused = tower.forward = FrozenTower(tower, attend)


def _linear(x: Tensor, linear: nn.Linear) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _merged(merger: nn.Module, x: Tensor, graph: bool) -> Tensor:
    """A merger's output [V, C]; with a graph it keeps its input, which the blocks go on to write over."""
    with torch.set_grad_enabled(graph):
        return merger(x.clone() if graph else x)  # type: ignore[no-any-return]
