"""How fast a machine is: what its kind of GPU reaches, or what was measured on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.measured import RATES
from launcher.planning.gpus import ASSUMED_KIND, GPU_KINDS, kind_of

# Bytes a second of elementwise kernels on large tensors, of the data sheet's bandwidth.
STREAMED = 0.85
# Seconds that the host takes for one kernel beside its other work: what planning.fitted counts kernels with.
LAUNCH_S = 9e-6
# What `check speed` said on one H200 (torch 2.11, CUDA 13) of the machines that planning.fitted was fitted on, so that
# its constants mean the same on a machine that is measured and on one that is not.
REFERENCE_KIND = "h200"
REFERENCE = {
    "matmul_tflops": 683.0,
    "memory_gbs": 4370.0,
    "attention_tflops": 303.0,
    "launch_s": 1.68e-5,
    "host_gbs": 55.4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a GPU and its links reach; bytes in GB (10^9)."""

    matmul_tflops: float  # large bf16 products
    memory_gbs: float  # elementwise kernels
    attention_tflops: float  # forward pass of a long causal sequence
    launch_s: float  # host time of a kernel
    host_gbs: float  # copies from pinned main memory
    link_gbs: float  # all-gather within a host, bus bandwidth
    network_gbs: float  # a GPU's share of its host's network
    peak_tflops: float  # data sheet
    source: str  # a sentence


def rates_of(kind: str | None, measured: Mapping[str, Any] | None = None, *, hosts: int = 1) -> Rates:
    """Rates of a kind of GPU (a key of GPU_KINDS or a device name), each replaced by what was measured on it.

    `measured`: what `python -m launcher check speed` saved; `hosts` only decides what the sentence tells.
    """
    known = kind_of(kind) if kind is not None else None
    name = str(kind) if known is not None else ASSUMED_KIND
    gpu = known or GPU_KINDS[ASSUMED_KIND]
    hopper = gpu.capability >= (9, 0)
    rates = Rates(
        matmul_tflops=gpu.matmul_tflops,
        memory_gbs=STREAMED * gpu.memory_gbs,
        attention_tflops=gpu.matmul_tflops * (0.5 if hopper else 0.7),  # FlashAttention 2 is not made for Hopper
        launch_s=LAUNCH_S,
        host_gbs=gpu.host_gbs,
        link_gbs=gpu.link_gbs,
        network_gbs=gpu.network_gbs,
        peak_tflops=gpu.peak_tflops,
        source=_said(kind, name),
    )
    if measured is not None:
        found = {field: _reached(field, float(measured[field])) for field in RATES if measured.get(field)}
        rates = replace(rates, **found, source=f"measured on {measured['host']}, {measured['date']}")
    if hosts > 1:
        each = f"{8 * rates.network_gbs:.0f} Gb/s a GPU"
        rates = replace(rates, source=f"{rates.source}; network assumed: {each}")
    return rates


def _reached(field: str, measured: float) -> float:
    """What a measurement stands for: the rate that H200s are given, by how much it differs from theirs."""
    if field not in REFERENCE:
        return measured
    return float(getattr(rates_of(REFERENCE_KIND), field)) * measured / REFERENCE[field]


def measured_on(kind: str | None, speeds: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first of some measurements (launcher.measured.read_speeds) that is of GPUs of this kind, None without one."""
    if kind is None:
        return None
    for found in speeds:
        name = str(found.get("kind"))
        if name == kind or (kind_of(name) is not None and kind_of(name) is kind_of(kind)):
            return found
    return None


def _said(kind: str | None, name: str) -> str:
    if kind is None:
        return f"usual rates of {name}, which is assumed (cluster.gpu=KIND)"
    if name != kind:
        return f"usual rates of {name}: {kind} is not known (python -m launcher check speed measures it)"
    return f"usual rates of {name} (python -m launcher check speed measures this machine)"
