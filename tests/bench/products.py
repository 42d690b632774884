"""TFLOP/s that large bf16 products reach on this machine, as JSON: `python -m tests.bench.products`."""

from __future__ import annotations

import json
import time

import torch

SHAPES = {"8192 x 8192 x 8192": (8192, 8192, 8192), "16384 x 4096 x 12288": (16384, 4096, 12288)}
SECONDS = 0.5  # of each: a cold GPU's clock is higher than the one it can keep


def rate(rows: int, inner: int, columns: int) -> float:
    """Of one shape, values random: zeros cost less power and run faster."""
    left = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(inner, columns, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        left @ right
    torch.cuda.synchronize()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < SECONDS:
        for _ in range(20):
            left @ right
        torch.cuda.synchronize()
        count += 20
    return 2e-12 * rows * inner * columns * count / (time.perf_counter() - begun)


if __name__ == "__main__":
    print(
        json.dumps(
            {name: round(rate(*shape), 1) for name, shape in SHAPES.items()} if torch.cuda.is_available() else {}
        )
    )
