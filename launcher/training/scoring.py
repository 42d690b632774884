"""The module DeepSpeed wraps: a packed micro-batch in, one float32 score a document out.

The forward is composed here rather than left to transformers' own, so that every rank makes exactly one call
of the vision tower a micro-step, whatever its rows hold, in the same order (collectives of ZeRO must match),
and so that lm_head is never called: a score is the hidden state at a document's last token times one vector.

Shapes: T packed tokens, D documents, H hidden size, V visual tokens, P patches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.training.batching import MicroBatch


class Scorer(nn.Module):
    """Scores documents with a Qwen3-VL model, bare or wrapped by peft.

    score = h_last . (w_yes - w_no) in float32: the logit difference of the answers "yes" and "no", and
    sigmoid(score) is the published P(yes). `train_head` makes the two rows an own parameter.
    """

    head_delta: torch.Tensor

    def __init__(
        self, model: Any, answer_rows: torch.Tensor, *, train_head: bool, always_see: bool, padded: bool
    ) -> None:
        """`answer_rows` [2, H]: lm_head's rows of "no" and "yes". `always_see` runs the tower without an image too;
        `padded`: the attention kernel needs micro-batches with padded segments."""
        super().__init__()
        self.model = model
        self.always_see, self.padded = always_see, padded
        self.head: nn.Parameter | None = nn.Parameter(answer_rows.clone()) if train_head else None
        delta = answer_rows[1].float() - answer_rows[0].float()
        self.register_buffer("head_delta", delta, persistent=False)

    @property
    def core(self) -> Any:
        """Qwen3VLModel: `.visual` and `.language_model`, adapters in place."""
        bare = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        return bare.model

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Scores [D], float32."""
        core = self.core
        features = self._see(core, batch)
        embeds = core.language_model.embed_tokens(batch.input_ids)  # [T, H]
        deep: list[torch.Tensor] | None = None
        mask = None
        if features is not None:
            merged, deep = features
            if batch.visual_rows is None:
                # No image here, yet the tower ran for the other ranks' sake: it adds exactly nothing.
                embeds = embeds + 0.0 * torch.stack([f.sum() for f in [merged, *deep]]).sum().to(embeds.dtype)
                deep = None
            else:
                embeds = embeds.index_put((batch.visual_rows,), merged[batch.visual_source].to(embeds.dtype))
                deep = [f[batch.visual_source] for f in deep]
                mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
                mask[0, batch.visual_rows] = True
        hidden = core.language_model(
            inputs_embeds=embeds[None],
            position_ids=batch.position_ids[:, None],
            attention_mask=None,
            use_cache=False,
            visual_pos_masks=mask,
            deepstack_visual_embeds=deep,
            packed=batch.layout,
        ).last_hidden_state[0]
        last = hidden[batch.last].float()
        delta = self.head_delta if self.head is None else self.head[1].float() - self.head[0].float()
        return last @ delta

    def _see(self, core: Any, batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """The tower's merged features and its deepstack features, each [V', H]; None where it needn't run."""
        pixels, grid = batch.pixel_values, batch.grid_thw
        weight = core.visual.patch_embed.proj.weight
        if pixels is None or grid is None:
            if not self.always_see:
                return None
            merge, config = core.visual.spatial_merge_size, core.visual.config
            width = config.in_channels * config.temporal_patch_size * config.patch_size**2
            pixels = torch.zeros(merge * merge, width, device=weight.device)
            grid = torch.tensor([[1, merge, merge]], device=weight.device)
        out = core.visual(pixels.to(weight.dtype), grid_thw=grid)
        return out.pooler_output, list(out.deepstack_features)


def answer_rows(model: Any, no_id: int, yes_id: int) -> torch.Tensor:
    """lm_head's rows of "no" and "yes", [2, H] float32, gathered when ZeRO-3 has partitioned them."""
    weight = model.get_output_embeddings().weight
    if not hasattr(weight, "ds_id"):
        return weight.detach()[[no_id, yes_id]].float().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight]):
        return weight.detach()[[no_id, yes_id]].float().clone()
