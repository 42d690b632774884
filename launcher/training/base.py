"""Which weights the frozen parts of a run are: a checkpoint does not hold them, and another base would spoil it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.hubs import local_folder
from launcher.spec import RunPlan

PLACES, PIECE = 64, 4096  # so many pieces of so many bytes tell a weight file: training changes all of a matrix


def base_of(plan: RunPlan) -> dict[str, str] | None:
    """A digest of each weight file that frozen parameters come from; None where none do, or none is on this disk.

    Random weights are told by the seed, which is in the fingerprint.
    """
    model = plan.config.model
    frozen = sum(plan.parameters.values()) > sum(n for part, n in plan.trainable.items() if part in plan.parameters)
    folder = Path(model.path) if model.path else None
    if folder is None and model.repo:
        folder = local_folder(model.repo, model.source, "models")
    if model.weights == "random" or not frozen or folder is None:
        return None
    return {file.name: _digest(file) for file in sorted(folder.glob("*.safetensors"))} or None


def check_base(plan: RunPlan, state: dict[str, Any], checkpoint: Path) -> None:
    """Raise ConfigError when a checkpoint's frozen parts came from other weight files than this run's."""
    saved, here = state.get("base"), base_of(plan)
    if saved is None or here is None or saved == here:
        return
    name = min(file for file in saved.keys() | here.keys() if saved.get(file) != here.get(file))
    text = f"the frozen parts come from other weights than those that {checkpoint} was trained on: {name} differs"
    raise ConfigError(Problem(text, tries=("model.path=FOLDER with the base model of that run",)))


def _digest(file: Path) -> str:
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with open(file, "rb") as opened:
        for place in range(PLACES):
            opened.seek(place * max(0, size - PIECE) // (PLACES - 1))
            found.update(opened.read(PIECE))
    return found.hexdigest()[:16]
