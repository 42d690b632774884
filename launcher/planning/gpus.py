"""What is known of kinds of GPUs, by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuKind:
    """What is known of a GPU by its name. Rates are those that programs reach, not those of data sheets."""

    memory_bytes: int
    capability: tuple[int, int]  # CUDA compute capability; bf16 needs 8.0
    peak_tflops: float  # data sheet: dense products of bf16 (fp16 before 8.0) with float32 sums
    matmul_tflops: float  # the best that large products reach
    memory_gbs: float  # data sheet: bandwidth of its own memory, GB/s
    link_gbs: float  # all-gather between the GPUs of a host, bus bandwidth, GB/s
    host_gbs: float  # copies from pinned main memory, GB/s
    network_gbs: float  # a GPU's share of its host's usual network, GB/s


# Shares of the data sheet that large matrix products reach. H100, H200: 794.5 of 989, A100: 271 of 312, B200: 1745 of
# 2250 (stas00/ml-engineering, "MAMF"); others are assumed to be like the A10's.
_H, _A, _B, _OTHER = 0.803, 0.869, 0.775, 0.75
# All-gather between two H200s, 256 MiB: 243 of 450 GB/s one way; eight behind switches reach 361. Other NVLinks are
# scaled by their data sheets; a pair on PCIe 4 reaches about 20, on PCIe 3 about 10.
_NVLINK = 243 / 450
_PCIE5, _PCIE4, _PCIE3 = 55.0, 25.0, 12.0  # pinned copies; 55 is measured on an H200
# Networks that hosts of such GPUs usually have: 400 Gb/s a GPU, 200 Gb/s a GPU, 100 Gb/s for a host of 8, at 80 %.
_NET400, _NET200, _NET100 = 40.0, 20.0, 1.25


def _kind(
    gib: float, capability: tuple[int, int], peak: float, share: float, memory: float, *links: float
) -> GpuKind:  # fmt: skip
    link, host, net = links
    return GpuKind(
        memory_bytes=int(gib * GIB),
        capability=capability,
        peak_tflops=peak,
        matmul_tflops=share * peak,
        memory_gbs=memory,
        link_gbs=link,
        host_gbs=host,
        network_gbs=net,
    )


# Memory as the driver reports it, a little below the name's number; peaks and bandwidths from NVIDIA's data sheets.
GPU_KINDS = {
    "b200": _kind(179, (10, 0), 2250, _B, 8000, 900 * _NVLINK, _PCIE5, _NET400),
    "h200": _kind(140, (9, 0), 989, _H, 4800, 450 * _NVLINK, _PCIE5, _NET400),
    "h100": _kind(79.6, (9, 0), 989, _H, 3350, 450 * _NVLINK, _PCIE5, _NET400),
    "h20": _kind(95.6, (9, 0), 148, 0.9, 4000, 450 * _NVLINK, _PCIE5, _NET400),  # few units: memory keeps up
    "a100_80g": _kind(79.3, (8, 0), 312, _A, 2039, 300 * _NVLINK, _PCIE4, _NET200),
    "a100_40g": _kind(39.4, (8, 0), 312, _A, 1555, 300 * _NVLINK, _PCIE4, _NET200),
    "a800_80g": _kind(79.3, (8, 0), 312, _A, 2039, 200 * _NVLINK, _PCIE4, _NET200),
    "l40s": _kind(44.7, (8, 9), 362, _OTHER, 864, 20, _PCIE4, _NET100),
    "l4": _kind(22.5, (8, 9), 121, _OTHER, 300, 10, _PCIE4, _NET100),
    "a10": _kind(22.5, (8, 6), 125, _OTHER, 600, 20, _PCIE4, _NET100),
    "a6000": _kind(47.5, (8, 6), 155, _OTHER, 768, 20, _PCIE4, _NET100),
    "rtx5090": _kind(31.8, (12, 0), 209, _OTHER, 1792, 20, _PCIE5, _NET100),
    "rtx4090": _kind(23.6, (8, 9), 165, _OTHER, 1008, 20, _PCIE4, _NET100),
    "rtx3090": _kind(23.6, (8, 6), 71, _OTHER, 936, 20, _PCIE4, _NET100),
    "v100_32g": _kind(31.7, (7, 0), 125, _OTHER, 900, 150 * _NVLINK, _PCIE3, _NET100),
    "v100_16g": _kind(15.8, (7, 0), 125, _OTHER, 900, 150 * _NVLINK, _PCIE3, _NET100),
    "t4": _kind(14.7, (7, 5), 65, _OTHER, 320, 10, _PCIE3, _NET100),
}
ASSUMED_KIND = "h100"  # when nothing is known


def kind_of(name: str) -> GpuKind | None:
    """The kind of a key of GPU_KINDS or of a driver's device name, None when unknown.

    Example:
        >>> kind_of("NVIDIA A100-SXM4-80GB") is GPU_KINDS["a100_80g"], kind_of("NVIDIA A10") is GPU_KINDS["a10"]
        (True, True)
    """
    if name in GPU_KINDS:
        return GPU_KINDS[name]
    said = name.lower()
    for key, kind in GPU_KINDS.items():
        chip, _, memory = key.partition("_")
        spelled = re.sub(r"^rtx", r"rtx[ -]?", chip)
        if re.search(rf"(?<![a-z0-9]){spelled}(?!\d)", said) and (not memory or f"{memory}b" in said):
            return kind
    return None


def capability_of(name: str | None) -> tuple[int, int] | None:
    """Compute capability of a kind of GPU by its name, None when unknown."""
    kind = None if name is None else kind_of(name)
    return None if kind is None else kind.capability
