"""The module DeepSpeed wraps: a packed micro-batch in, what the task's head reads off it out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.training.backbone import core_of, hidden_states
from launcher.training.batching import MicroBatch
from launcher.training.pieces import MediaKey
from launcher.training.vision_sight import Sight


class Scorer(nn.Module):
    """A model, bare or wrapped by peft, and the head of a task (launcher.training.heads)."""

    def __init__(self, model: Any, head: nn.Module, *, always_see: bool, padded: bool, sight: Sight | None) -> None:
        """`always_see` runs the vision tower, that of `sight`, without an image too; `padded`: the attention kernel
        needs micro-batches with padded segments."""
        super().__init__()
        self.model, self.head = model, head
        self.always_see, self.padded, self.sight = always_see, padded, sight

    @property
    def core(self) -> Any:
        """transformers' model without its head, adapters in place."""
        return core_of(self.model)

    def knows(self, key: MediaKey) -> bool:
        """Whether an image need not be decoded, for all of the run."""
        return self.sight is not None and self.sight.knows(key)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """What the head gives: scores [D] float32 for a reranker."""
        rows = self.head.reads(batch)  # type: ignore[operator]
        hidden = hidden_states(self.core, batch, always_see=self.always_see, rows=rows, sight=self.sight)
        return self.head(hidden, batch)  # type: ignore[no-any-return]
