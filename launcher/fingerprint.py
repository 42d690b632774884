"""What a checkpoint and the run that continues it must have in common. Standard library only: both planes ask."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.spec import RunConfig

# Keys of config.json that do not change what the weights mean.
_VOLATILE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


def fingerprint(config: RunConfig, arch: dict[str, Any]) -> dict[str, Any]:
    """Settings that decide which parameters exist, where the frozen ones come from, and the order of the data.

    Frozen parameters are not in a checkpoint: they come from the base model again, so the base must
    be the same. Files and folders count by their last name, since they move between machines.
    Everything else may change: ranks, ZeRO stage, precision, length, learning rate, loss.
    """
    model, tune, dataset = config.model, config.tune, config.dataset
    return {
        "model": model.name,
        "model.path": _last_name(model.path) if model.path else None,
        "model.weights": model.weights,
        "model.arch": hashlib.sha256(_canonical(_lasting(arch)).encode()).hexdigest()[:16],
        "task": config.task.name,
        "tune": tune.name,
        "tune.language": tune.language,
        "tune.vision": tune.vision,
        "tune.projector": tune.projector,
        "tune.head": tune.head,
        "tune.r": tune.r,
        "tune.lora_alpha": tune.lora_alpha,
        "tune.target_modules": tune.target_modules,
        "tune.use_rslora": tune.use_rslora,
        "tune.use_dora": tune.use_dora,
        "dataset": dataset.name,
        "dataset.train": ", ".join(_last_name(name) for name in dataset.sources("train")) or None,
        "dataset.subset": dataset.subset,
        "dataset.split": dataset.split,
        "dataset.weights": dataset.weights,
        "dataset.eval_fraction": 0.0 if dataset.eval is not None else dataset.eval_fraction,
        "dataset.max_rows": dataset.max_rows,
        "dataset.shuffle_labels": dataset.shuffle_labels,
        "batch.global_size": config.batch.global_size,
        "train.seed": config.train.seed,
    }


def misfits(saved: dict[str, Any], now: dict[str, Any], checkpoint: str) -> list[Problem]:
    """One problem for each setting in which a checkpoint's fingerprint and this run's differ."""
    return [
        Problem(
            f"{key}={_text(now[key])}, but the checkpoint was saved with {key}={_text(saved.get(key))}",
            where=checkpoint,
            tries=("the checkpoint's own model",)
            if key == "model.arch"
            else (f"{key}={_placed(key, saved.get(key))}",),
        )
        for key in now
        if now[key] != saved.get(key) and not (key == "model.arch" and now["model"] != saved.get("model"))
    ]


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in _VOLATILE}
    return value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _last_name(path: str) -> str:
    return Path(path).name


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if value is None or isinstance(value, bool | list) else str(value)


def _placed(key: str, value: Any) -> str:
    """As it is to be typed: of what counts by its last name, the place is to be told."""
    if key not in ("model.path", "dataset.train") or not value:
        return _text(value)
    names = [f"FOLDER/{name}" for name in str(value).split(", ")]
    return names[0] if len(names) == 1 else f"[{','.join(names)}]"
