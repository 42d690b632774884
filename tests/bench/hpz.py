"""Losses of ZeRO-3 with a copy of the weights for each host (hpZ), four CPU ranks as two hosts of two, beside ZeRO-3's.

usage: python -m tests.bench.hpz
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.zero_support import start

PAIRS = {"full": ("full, small micro-batches", "a copy on the host"), "lora": ("lora", "a copy on the host, lora")}


def main() -> int:
    """Print both losses of every step; 1 when they differ by more than rounding does."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        start(4, Path(folder), cases="hosts")
        for tune, names in PAIRS.items():
            plain, copied = (
                json.loads((Path(folder) / f"{name}, stage 3, ranks 4.json").read_text())["loss"] for name in names
            )
            print(f"{tune}: ZeRO-3 {[round(x, 6) for x in plain]}, with hpZ {[round(x, 6) for x in copied]}")
            worst = max(worst, *(abs(a - b) for a, b in zip(plain, copied, strict=True)))
    print(f"largest difference of a loss: {worst:.1e}")
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
