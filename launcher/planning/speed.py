"""What a packed sequence costs, in FLOPs of a forward pass. Ranks balance their micro-batches by it."""

from __future__ import annotations

from launcher.planning.shapes import Shape, weights
from launcher.spec import CostModel


def cost_model(shape: Shape) -> CostModel:
    """Coefficients of the cost formula, two FLOPs for each multiply and add.

    A reranker calls no lm_head, so vocabulary weights do not count; of experts, those that a token takes do. Each
    visual token runs one merger and one for every deepstack feature map; that share is spread over its patches.
    A linear-attention layer costs its projections: its own products are a small part of them.
    """
    v = shape.vision
    patch = patch_pair = 0.0
    if v is not None:
        mergers = (1 + v.deepstack) * weights(v.merger) / v.merge**2
        windows = 4.0 * v.windowed * v.window_patches * v.hidden
        patch = 2.0 * (v.patch_values * v.hidden + v.depth * weights(v.block) + mergers) + windows
        patch_pair = 4.0 * (v.depth - v.windowed) * v.hidden
    return CostModel(
        token=2.0 * shape.token_weights,
        token_pair=4.0 * len(shape.attending) * shape.q_width,
        patch=patch,
        patch_pair=patch_pair,
    )
