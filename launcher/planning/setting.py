"""All that a rank's bytes and seconds depend on, beside what its micro-batches hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.planning.shapes import Shape
from launcher.spec import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A run as its memory and its speed see it. `memory.estimate` and `speed.predict` take one, and a Load."""

    config: RunConfig
    shape: Shape
    deepspeed: dict[str, Any]  # the finished DeepSpeed configuration
    precision: str  # bf16 | fp16 | fp32
    device: str  # cuda | cpu
    gpu_kind: str | None  # a key of gpus.GPU_KINDS or a driver's device name
    world: int  # ranks
    slots: int  # ranks of a host, the most that any has
    checkpointed_layers: int  # decoder layers recomputed in the backward pass
    attention: str  # as RunPlan.attention

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.deepspeed["zero_optimization"]["stage"])

    @property
    def recomputed(self) -> float:
        """Share of the decoder's layers that are computed again in the backward pass."""
        return self.checkpointed_layers / self.shape.layers
