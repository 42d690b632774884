"""Random state of one rank as JSON: Python, NumPy, torch, and the rank's accelerator."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def get_rng() -> dict[str, Any]:
    """The state of every generator, JSON-ready."""
    legacy: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = legacy
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def set_rng(state: dict[str, Any]) -> None:
    """Restore what `get_rng` returned; a state without CUDA's restores the others."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _encode(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
