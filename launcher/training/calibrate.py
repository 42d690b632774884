"""Measure this machine's GPUs in some seconds: the rates that plans are made with (`python -m launcher check speed`).

Each GPU has a process of its own and all measure at the same time, as in training: they share the host's memory and
its power. Every function takes a device and sizes, so that a CPU can run them too, on small ones.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from launcher.attention_needs import PADDED
from launcher.errors import ExitCode, MachineError, Problem
from launcher.measured import RATES, VERSION
from launcher.rundir import write_json
from launcher.training.attention import KERNELS, choose_kernel, make_layout

PART_S = 1.5  # for each kind of measurement
BLOCKS = 5  # of repetitions; their median counts
# The linear layers of Qwen3-8B with the tokens of a usual micro-batch: [rows, input width, output width].
PRODUCT = (8192, 4096, 12288)
STREAM = 2**28  # values of one tensor: larger than any cache
LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 4096, 32, 8, 128
COPY_BYTES, GATHER_BYTES = 2**28, 2**28
SMALL_OPS = 9  # kernels that `_small` calls


def seconds_of(run: Callable[[], Any], device: torch.device, budget_s: float = PART_S) -> float:
    """Seconds of one call: the median of some blocks of calls that follow each other without a pause."""
    run()
    synchronize(device)
    begun = time.perf_counter()
    run()
    synchronize(device)
    once = max(time.perf_counter() - begun, 1e-7)
    calls = max(1, int(budget_s / BLOCKS / once))
    found = []
    for _ in range(BLOCKS):
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        found.append((time.perf_counter() - begun) / calls)
    return statistics.median(found)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_tflops(device: torch.device, size: tuple[int, int, int] = PRODUCT, budget_s: float = PART_S) -> float:
    """bf16 products of random numbers; zeros would take less power, and run faster than training does."""
    rows, inner, outer = size
    a = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    b = torch.randn(outer, inner, device=device, dtype=torch.bfloat16)
    return 2.0 * rows * inner * outer / seconds_of(lambda: F.linear(a, b), device, budget_s) / 1e12


def memory_gbs(device: torch.device, values: int = STREAM, budget_s: float = PART_S) -> float:
    """An elementwise kernel that reads two tensors and writes one."""
    a, b = (torch.ones(values, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 6.0 * values / seconds_of(lambda: torch.add(a, b, out=out), device, budget_s) / 1e9


def attention_tflops(device: torch.device, length: int = LENGTH, heads: int = HEADS, budget_s: float = PART_S) -> float:
    """The kernel that attention=auto takes here: two causal sequences of `length` tokens, forward."""
    kernel, _ = choose_kernel("auto", device, torch.bfloat16)
    key_heads = max(1, heads * KEY_HEADS // HEADS)
    q, k, v = (
        torch.randn(2 * length, n, HEAD_DIM, device=device, dtype=torch.bfloat16) for n in (heads, key_heads, key_heads)
    )
    rows = [(0, length), (length, 2 * length)]
    layout = make_layout(rows, [(0, 0)] * 2, padded=kernel in PADDED).to(device)
    attend = KERNELS[kernel]
    pairs = 2 * length * (length + 1) / 2
    return 4.0 * heads * HEAD_DIM * pairs / seconds_of(lambda: attend(q, k, v, layout, None), device, budget_s) / 1e12


def launch_s(device: torch.device, budget_s: float = PART_S) -> float:
    """Host seconds of a kernel in eager Python: a small module whose kernels take no time, its gradients recorded."""
    linear = torch.nn.Linear(64, 64, device=device, dtype=torch.bfloat16)
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    return seconds_of(lambda: _small(linear, x), device, budget_s) / SMALL_OPS


def _small(linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A norm, as transformers writes it, a linear layer and a residual sum: SMALL_OPS kernels."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x + linear(wide.to(x.dtype))


def host_gbs(device: torch.device, size: int = COPY_BYTES, budget_s: float = PART_S) -> float:
    """Copies from pinned main memory."""
    pinned = device.type == "cuda"
    source = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / seconds_of(lambda: target.copy_(source, non_blocking=True), device, budget_s) / 1e9


def link_gbs(device: torch.device, size: int = GATHER_BYTES, budget_s: float = PART_S) -> float:
    """All-gather of `size` bytes over all ranks: bus bandwidth, what each rank receives from others a second."""
    world = dist.get_world_size()
    own = torch.ones(size // world, dtype=torch.uint8, device=device)
    whole = torch.empty(len(own) * world, dtype=torch.uint8, device=device)
    calls = 2 if device.type == "cpu" else max(1, int(budget_s / BLOCKS / (size / 100e9)))  # alike on every rank
    found = []
    for _ in range(BLOCKS + 1):
        dist.barrier()
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(calls):
            dist.all_gather_into_tensor(whole, own)
        synchronize(device)
        found.append((time.perf_counter() - begun) / calls)
    return len(whole) * (world - 1) / world / statistics.median(found[1:]) / 1e9


def measure(device: torch.device) -> dict[str, float]:
    """All rates of one GPU but that of its links."""
    return {
        "matmul_tflops": matmul_tflops(device),
        "memory_gbs": memory_gbs(device),
        "attention_tflops": attention_tflops(device),
        "launch_s": launch_s(device),
        "host_gbs": host_gbs(device),
    }


def joined(gpus: list[dict[str, float]]) -> dict[str, float | None]:
    """The rates of a machine: those of its slowest GPU, which the others wait for."""
    worst = {"launch_s": max}
    found: dict[str, float | None] = dict.fromkeys(RATES)
    for name in RATES:
        values = [gpu[name] for gpu in gpus if name in gpu]
        found[name] = worst.get(name, min)(values) if values else None
    return found


def _rank(rank: int, world: int, folder: str) -> None:
    """One process: its GPU's rates, written to a file of its own."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
        dist.barrier()
    found = measure(device)
    if world > 1:
        found["link_gbs"] = link_gbs(device)
        dist.destroy_process_group()
    write_json(Path(folder) / f"{rank}.json", found)


def calibrate(out: Path) -> dict[str, Any]:
    """Measure all GPUs that are visible and write the file that plans read. Raises MachineError without one."""
    import tempfile

    from torch.multiprocessing.spawn import spawn

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        text = "no GPU is visible here, and only GPUs are measured"
        tries = ("nvidia-smi   (what the driver sees)", "the same command on a machine of the run")
        raise MachineError(Problem(text, tries=tries), title="with this machine")
    with tempfile.TemporaryDirectory() as folder:
        if count == 1:
            _rank(0, 1, folder)
        else:
            spawn(_rank, (count, folder), nprocs=count)  # type: ignore[no-untyped-call]
        gpus = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]
    content = {
        "version": VERSION,
        "host": socket.gethostname(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "kind": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        **joined(gpus),
        "gpus": gpus,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, content)
    return content


UNITS = {
    "matmul_tflops": ("bf16 products", 1.0, "TFLOP/s"),
    "attention_tflops": ("attention", 1.0, "TFLOP/s"),
    "memory_gbs": ("its own memory", 1.0, "GB/s"),
    "link_gbs": ("all-gather between GPUs", 1.0, "GB/s"),
    "host_gbs": ("copies from main memory", 1.0, "GB/s"),
    "launch_s": ("host time of a kernel", 1e6, "us"),
}


def table(content: dict[str, Any]) -> str:
    """What was found, for a person: the slowest GPU, and how far the others are from it."""
    count = len(content["gpus"])
    lines = [f"{count} x {content['kind']} on {content['host']}" + (", the slowest of them" if count > 1 else "")]
    for name, (said, factor, unit) in UNITS.items():
        if content.get(name) is None:
            continue
        values = [factor * gpu[name] for gpu in content["gpus"]]
        among = f"   ({min(values):,.1f} to {max(values):,.1f})" if count > 1 else ""
        lines.append(f"  {said:<24} {factor * content[name]:>9,.1f} {unit}{among}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """`speed --out FILE`: measure, print, write; exit code 3 where there is nothing to measure."""
    parser = argparse.ArgumentParser(prog="python -m launcher.training speed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    try:
        content = calibrate(options.out)
    except MachineError as error:
        print(error.render(), file=sys.stderr)
        return int(error.exit_code)
    print(f"{table(content)}\nwritten to {options.out}; plans are made with it")
    return int(ExitCode.OK)
