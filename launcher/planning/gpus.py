"""What is known of kinds of GPUs, by their names."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuKind:
    """What is known of a GPU by its name."""

    memory_bytes: int
    capability: tuple[int, int]  # CUDA compute capability; bf16 needs 8.0


def _kind(gib: float, major: int, minor: int = 0) -> GpuKind:
    return GpuKind(memory_bytes=int(gib * GIB), capability=(major, minor))


# Memory as the driver reports it, a little below the name's number.
GPU_KINDS = {
    "b200": _kind(179, 10),
    "h200": _kind(140, 9),
    "h100": _kind(79.6, 9),
    "h20": _kind(95.6, 9),
    "a100_80g": _kind(79.3, 8),
    "a100_40g": _kind(39.4, 8),
    "a800_80g": _kind(79.3, 8),
    "l40s": _kind(44.7, 8, 9),
    "l4": _kind(22.5, 8, 9),
    "a10": _kind(22.5, 8, 6),
    "a6000": _kind(47.5, 8, 6),
    "rtx5090": _kind(31.8, 12),
    "rtx4090": _kind(23.6, 8, 9),
    "rtx3090": _kind(23.6, 8, 6),
    "v100_32g": _kind(31.7, 7),
    "v100_16g": _kind(15.8, 7),
    "t4": _kind(14.7, 7, 5),
}
ASSUMED_KIND = "h100"  # when nothing is known


def kind_of(name: str) -> GpuKind | None:
    """The kind whose name stands in a driver's device name such as "NVIDIA H200", None when unknown."""
    squeezed = "".join(c for c in name.lower() if c.isalnum())
    for key, kind in GPU_KINDS.items():
        if key.partition("_")[0] in squeezed and "_" not in key:
            return kind
    return None
