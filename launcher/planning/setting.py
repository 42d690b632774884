"""All that a rank's bytes and seconds depend on, beside what its micro-batches hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.attention_needs import AMPERE, HOPPER
from launcher.kernels import fused_layers, without_triton
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
    capability: tuple[int, int] | None  # as RunPlan.capability
    world: int  # ranks
    slots: int  # ranks of a host, the most that any has
    checkpointed_layers: int  # decoder layers recomputed in the backward pass
    attention: str  # as RunPlan.attention
    processors: int | None = None  # of a rank, None where nobody has counted them

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.deepspeed["zero_optimization"]["stage"])

    @property
    def fused(self) -> bool:
        """Whether decoder layers are computed by the fused functions."""
        return fused_layers(self.config, self.shape.family, self.device, self.capability)[0]

    @property
    def together(self) -> bool:
        """Whether frozen weights of fused layers lie with their adapters: they stay in place, in 16 bits or more."""
        return (
            self.fused and self.stage < 3 and self.config.tune.language == "lora" and self.config.tune.name != "qlora"
        )

    @property
    def fast_tower(self) -> bool:
        """Whether the vision tower runs by launcher.training.vision_tower (why_plain)."""
        tune, offloaded = self.config.tune, self.deepspeed["zero_optimization"].get("offload_param") or {}
        whole = self.stage < 3 or (tune.projector == "frozen" and offloaded.get("device") != "nvme")
        return tune.vision == "frozen" and whole and without_triton(self.capability) is None

    @property
    def recomputed(self) -> float:
        """Share of the decoder's layers that are computed again in the backward pass."""
        return self.checkpointed_layers / self.shape.layers


def kernel_of(setting: Setting) -> str:
    """The attention kernel of a setting: of `auto`, what launcher.training.attention takes where it is installed."""
    kernel = setting.attention
    if kernel != "auto" or setting.device == "cpu":
        return kernel
    capability = setting.capability or AMPERE
    if setting.precision == "fp32" or capability < AMPERE:
        return "sdpa"
    return "cudnn" if capability[0] == HOPPER[0] and not setting.config.train.deterministic else "varlen"
