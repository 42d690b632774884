"""Where a hub's models and data sets lie on this machine's disk. Standard library only; nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.errors import ConfigError, Problem
from launcher.spec import ModelConfig

WHOLE = ".launcher-complete"  # what a finished download from ModelScope leaves, as its own cache has no mark


def local_folder(name: str, source: str, kind: str) -> Path | None:
    """The folder with OWNER/NAME, a `kind` of models or datasets, of source hf or modelscope; None: not here."""
    if source == "modelscope":
        folder = modelscope_folder(name, kind)
        return folder if (folder / WHOLE).is_file() else None
    folder = hf_cache() / f"{kind}--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def model_source(model: ModelConfig) -> str:
    """What `from_pretrained` is given: a folder, or the name by which Hugging Face's cache knows it.

    Raises ConfigError for a model of ModelScope that is not here yet.
    """
    if model.path is not None or model.source == "hf":
        return str(model.path or model.repo)
    folder = local_folder(str(model.repo), model.source, "models")
    if folder is None:
        text = f"{model.repo} of ModelScope is not on this machine"
        raise ConfigError(Problem(text, tries=("python -m launcher fetch ...", "model.source=hf")))
    return str(folder)


def weights_folder(model: ModelConfig) -> Path | None:
    """The folder of a model's files where it is on this machine's disk already."""
    if model.path is not None:
        return Path(model.path) if Path(model.path).is_dir() else None
    return local_folder(str(model.repo), model.source, "models")


def hf_cache() -> Path:
    """The cache of huggingface_hub, found as it finds it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(os.path.expanduser(named or os.path.join(home, "hub"))))


def modelscope_folder(name: str, kind: str) -> Path:
    """Where a fetch puts what ModelScope gives: beside its own cache, in a layout that its versions do not change."""
    cache = os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope"
    return Path(os.path.expandvars(os.path.expanduser(cache))) / "launcher" / kind / name
