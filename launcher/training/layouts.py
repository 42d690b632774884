"""Experts of Qwen3-VL-MoE lie in published files the other way round than in memory.

transformers 5 writes them as it holds them, and on loading tells the two apart by their shape. Under ZeRO-3 it cannot:
a sharded parameter's shape is [0], so that it always turns them; other programs read the published way only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from launcher.errors import ConfigError, Problem
from launcher.families import Family


def publish(folder: Path, family: Family) -> None:
    """Turn the experts in the files of `folder`, just written by transformers, to the published way."""
    if family.turned is None:
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  not a dict
        if any(re.fullmatch(family.turned, name) for name in tensors):
            turned = {n: t.transpose(1, 2) if re.fullmatch(family.turned, n) else t for n, t in tensors.items()}
            save_file({name: t.contiguous() for name, t in turned.items()}, file, metadata={"format": "pt"})


def check_published(folder: Path, family: Family, intermediate: int) -> None:
    """Refuse a folder whose experts ZeRO-3 would load turned; `intermediate` is an expert's inner size."""
    for name, shape in _experts(folder, family):
        if name.endswith("down_proj") and shape[1] != intermediate:
            text = f"model.path={folder} was saved by transformers 5, whose experts ZeRO-3 cannot load: {name} {shape}"
            tries = ("zero=stage2", "the published files", "a folder that `python -m launcher export` wrote")
            raise ConfigError(Problem(text, tries=tries))


def _experts(folder: Path, family: Family) -> Iterator[tuple[str, list[int]]]:
    if family.turned is None:
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  not a dict
                if re.fullmatch(family.turned, name):
                    yield name, stored.get_slice(name).get_shape()
