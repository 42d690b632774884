"""Keys of older DeepSpeed configurations: renamed ones rewritten, switched-off ones dropped, the others refused.

DeepSpeed 0.19.8 refuses what it has removed even where it is off, and takes five old names with a warning
(runtime/config.py `_REMOVED_*`, runtime/zero/config.py; deepspeedai/DeepSpeed#8489, #8490, #8563).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ZERO = "zero_optimization"


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """A section or key that DeepSpeed no longer has."""

    key: str  # with its section
    why: str
    tries: tuple[str, ...]
    off: tuple[Any, ...] = (False, None)  # values that ask for nothing, beside an object that is switched off


REMOVED = (
    Removed(
        key="amp",
        why="Apex AMP is gone; precision=bf16 computes in bfloat16 over float32 master weights",
        tries=("precision=bf16", "precision=fp16"),
    ),
    Removed(
        key="elasticity",
        why="elastic batches are gone; a run goes on on another number of GPUs with the same global batch",
        tries=("resume=RUN nodes=N   (on the hosts that are there)",),
    ),
    Removed(
        key="curriculum_learning",
        why="it ordered rows by difficulty in DeepSpeed's own loader, which this trainer does not use",
        tries=("dataset.train=FILE in the order you want",),
    ),
    Removed(
        key="compression_training",
        why="the compression library is gone: the model would train unquantised",
        tries=("tune=qlora   (weights of 4 bits)",),
    ),
    Removed(key="quantize_training", why="training with changing bits (MoQ) is gone", tries=("tune=qlora   (4 bits)",)),
    Removed(key="eigenvalue", why="it steered quantize_training, which is gone", tries=("remove the key",)),
    Removed(
        key="sparse_attention",
        why="block-sparse attention is gone",
        tries=("attention=flash_attention_2", "attention=auto"),
    ),
    Removed(
        key="sparse_gradients",
        why="gradients of embeddings are summed whole now",
        tries=("tune.language=lora   (embeddings stay frozen)", "remove the key"),
    ),
    Removed(
        key="nebula", why="the Nebula service is gone; checkpoints are the launcher's own", tries=("checkpoint.*",)
    ),
    Removed(key="graph_harvesting", why="CUDA graphs of the step are gone", tries=("remove the key",)),
    Removed(
        key="progressive_layer_drop",
        why="it changed the model while it trained, and is gone",
        tries=("remove the key",),
    ),
    Removed(
        key=f"{ZERO}.mics_shard_size",
        why="MiCS, which sharded over a part of the ranks, is gone; hpZ keeps a copy of the weights on each host",
        tries=("zero=stage3_hpz", "zero=stage3"),
        off=(False, None, -1, 0),
    ),
    Removed(
        key=f"{ZERO}.mics_hierarchical_params_gather",
        why="it belonged to MiCS, which is gone",
        tries=("zero=stage3_hpz", "zero=stage3"),
    ),
    Removed(
        key=f"{ZERO}.zeropp_loco_param",
        why="quantised gradients no longer remember their errors (LoCo)",
        tries=("zero=zeropp   (without it)", "zero=stage3   (exact gradients)"),
    ),
    Removed(
        key=f"{ZERO}.legacy_stage1",
        why="the first form of stage 1 is gone",
        tries=("remove the key",),
    ),
)
# Old name -> new name of a key with the same values.
RENAMED = {
    "bfloat16": "bf16",
    "aio.thread_count": "aio.intra_op_parallelism",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
}
# Old switch -> section that its `true` stands for.
SWITCHES = {f"{ZERO}.cpu_offload": f"{ZERO}.offload_optimizer", f"{ZERO}.cpu_offload_param": f"{ZERO}.offload_param"}
PINNED = f"{ZERO}.cpu_offload_use_pin_memory"

Refuse = Callable[..., None]


def modernised(raw: dict[str, Any], refuse: Refuse, notice: Callable[[str], None]) -> dict[str, Any]:
    """`raw` in today's keys; `refuse(key, text, *tries)` and `notice(text)` hear of everything that is changed."""
    new = copy.deepcopy(raw)
    for old, name in RENAMED.items():
        if _has(new, old):
            value = _take(new, old)
            if _has(new, name):
                refuse(old, f"{old} is the old name of {name}, and both are set", f"remove {old}")
                continue
            _put(new, name, value)
            notice(f"{old} is called {name} now, and is read as that")
    pinned = _take(new, PINNED) if _has(new, PINNED) else None
    if pinned is not None and not any(_has(new, old) for old in SWITCHES):
        notice(f"{PINNED} has no effect without cpu_offload, and is dropped")
    for old, name in SWITCHES.items():
        if _has(new, old):
            _switch(new, old, name, {} if pinned is None else {"pin_memory": pinned}, refuse, notice)
    for removed in REMOVED:
        if not _has(new, removed.key):
            continue
        value = _take(new, removed.key)
        if _is_off(value, removed.off):
            notice(f"{removed.key} is no longer a key of DeepSpeed; it is off, and is dropped")
        else:
            refuse(removed.key, f"{removed.key} is no longer a key of DeepSpeed: {removed.why}", *removed.tries)
    return new


def _switch(
    new: dict[str, Any], old: str, name: str, pinned: dict[str, Any], refuse: Refuse, notice: Callable[[str], None]
) -> None:
    value = _take(new, old)
    if _has(new, name):
        refuse(old, f"{old} is the old form of {name}, and both are set", f"remove {old}")
    elif value is True:
        _put(new, name, {"device": "cpu", **pinned})
        notice(f'{old} is called {name} now, and is read as {{"device": "cpu"}}')
    elif value in (False, None):
        notice(f"{old} is the old form of {name}; it is off, and is dropped")
    else:
        refuse(
            old, f"{old} is {value!r}, but must be true or false", f'"{name.rpartition(".")[2]}": {{"device": "cpu"}}'
        )


def asks_nothing(value: Any) -> bool:
    """Whether a setting leaves everything as it is: off, empty, or a neutral number such as a size of 1.

    Example:
        >>> asks_nothing({"enabled": False, "size": 8}), asks_nothing({"a": None, "b": 1}), asks_nothing({"a": True})
        (True, True, False)
    """
    if isinstance(value, dict):
        return value.get("enabled", True) is False or all(map(asks_nothing, value.values()))
    return value is not True and value in (False, None, 0, 1, "mean", "auto", [])


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether a removed key asks for nothing: no switch inside it is on."""
    if not isinstance(value, dict):
        return any(value is one or (value == one and type(value) is type(one)) for one in off)
    switches = list(_switches(value))
    return not value or (bool(switches) and not any(switches))


def _switches(value: dict[str, Any]) -> list[bool]:
    found = []
    for key, item in value.items():
        if isinstance(item, dict):
            found += _switches(item)
        elif key == "enabled" or key.endswith("_enabled"):
            found.append(item not in (False, None, "auto"))
    return found


def _has(raw: dict[str, Any], key: str) -> bool:
    section, _, name = key.rpartition(".")
    inside = raw.get(section) if section else raw
    return isinstance(inside, dict) and name in inside


def _take(raw: dict[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return (raw[section] if section else raw).pop(name)


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    (raw[section] if section else raw)[name] = value
