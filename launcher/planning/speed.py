"""What a packed sequence costs, in FLOPs of a forward pass. Ranks balance their micro-batches by it."""

from __future__ import annotations

from launcher.planning.models import Shape
from launcher.spec import CostModel


def cost_model(shape: Shape) -> CostModel:
    """Coefficients of the cost formula, two FLOPs for each multiply and add.

    A reranker calls no lm_head, so vocabulary weights do not count. Each visual token runs one merger
    and one for every deepstack feature map; that share is spread over its patches.
    """
    v = shape.vision
    mergers = (1 + v.deepstack) * v.merger / v.merge**2
    return CostModel(
        token=2.0 * shape.layers * shape.layer_matmul,
        token_pair=4.0 * shape.layers * shape.q_width,
        patch=2.0 * (v.patch_values * v.hidden + v.depth * v.block + mergers),
        patch_pair=4.0 * v.depth * v.hidden,
    )
