"""Whether a run's decoder layers are computed by the fused functions, and how these join adapters.

Standard library only: planner and ranks ask.
"""

from __future__ import annotations

from launcher.errors import Problem
from launcher.families import Family
from launcher.spec import RunConfig

FAMILIES = ("qwen3_vl", "qwen3", "qwen2_5_vl", "qwen2")  # whose layers are of the one shape that they compute

TRITON = (8, 0)  # the oldest compute capability that it supports (triton-lang/triton, README); none has bf16 before
INLINE_RANKS = 64  # joined: up to so many are added inside elementwise kernels, more by a product of their own


def padded_rank(ranks: int) -> int:
    """Of adapters joined, padded to whole 16s: the least that a tensor core multiplies."""
    return -(-ranks // 16) * 16


def row_stride(columns: int, spare: int) -> int:
    """Values from one row to the next of a matrix that has spare columns for adapters: whole 128 bytes in 16 bits.

    Rows that begin elsewhere touch two lines of the cache for each that a product reads.
    """
    return -(-(columns + spare) // 64) * 64 if spare else columns


def without_triton(capability: tuple[int, int] | None) -> str | None:
    """Why GPUs of a compute capability have no Triton kernels; None where they have, or where it is not known."""
    if capability is None or capability >= TRITON:
        return None
    needed, has = (".".join(map(str, one)) for one in (TRITON, capability))
    return f"Triton's kernels need compute capability {needed}, and the GPU has {has}"


def fused_layers(
    config: RunConfig, family: Family, device: str, capability: tuple[int, int] | None = None
) -> tuple[bool, str]:
    """(whether train.kernels gives the fused functions on a device, the reason).

    Asked for where they cannot be, the reason says why not; `device` is cuda or cpu, `capability` of the oldest GPU.
    """
    asked, why_not = config.train.kernels, _why_not(config, family, capability)
    if why_not is not None or asked == "plain":
        return False, why_not or "asked for"
    if asked == "fused":
        return True, "asked for"
    return (device == "cuda", "every layer is of the known shape" if device == "cuda" else "fused ones are for GPUs")


def kernel_problems(config: RunConfig, family: Family, capability: tuple[int, int] | None = None) -> list[Problem]:
    """train.kernels=fused where the fused functions cannot compute the layers."""
    why_not = _why_not(config, family, capability) if config.train.kernels == "fused" else None
    return [] if why_not is None else [Problem(f"train.kernels=fused: {why_not}", tries=("train.kernels=auto",))]


def _why_not(config: RunConfig, family: Family, capability: tuple[int, int] | None) -> str | None:
    tune = config.tune
    if (old := without_triton(capability)) is not None:
        return old
    if family.model_type not in FAMILIES:
        return f"layers of {family.model_type} have other parts"
    if "lora" in (tune.language, tune.vision, tune.projector):
        if tune.use_dora:
            return "tune.use_dora=true makes an adapter more than a product"
        if tune.lora_dropout > 0:
            return "tune.lora_dropout gives each adapter an input of its own"
    return None
