"""Checkpoints in a form of our own, independent of ZeRO stage and number of ranks, without pickle.

    step-000400/  part-00001-of-00002.safetensors ...   every trainable parameter by name, three
                  tensors each in float32: `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`
                  rng.json     random state of each rank
                  state.json   step, data position, metrics, fingerprint, sizes and hashes of the files
                  COMPLETE     hash of state.json; written last

Frozen parameters come from the base model again. Functions with an engine are collective.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from launcher.errors import ConfigError, Problem
from launcher.fingerprint import fingerprint, misfits
from launcher.rundir import (
    CHECKPOINT_FORMAT,
    COMPLETE,
    RunDir,
    checkpoint_serial,
    checkpoint_step,
    complete_checkpoints,
    damages,
    file_entry,
    read_json,
    write_atomic,
)
from launcher.spec import RunPlan
from launcher.training.base import base_of, check_base
from launcher.training.engine_state import (
    KINDS,
    MASTER,
    adam_step,
    finish_reading,
    finish_writing,
    full_shape,
    loss_scaler,
    prepare,
    read_state,
    set_loss_scaler,
    trainable_parameters,
    write_state,
)
from launcher.training.rng import get_rng, set_rng
from launcher.training.together import together

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor
    from torch.distributed import ProcessGroup

SHARD_BYTES = 2 * 2**30  # rank 0 holds one file's tensors at a time in host memory
RANDOM_FILE = "rng.json"

Shapes = dict[str, tuple[int, ...]]


def save(
    engine: DeepSpeedEngine,
    *,
    run: RunDir,
    step: int,
    state: dict[str, Any],
    plan: RunPlan,
    group: ProcessGroup | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Path:
    """Write the checkpoint of `step`; it appears whole or not at all. Call between optimizer steps.

    `state` is the loop's own (epoch, position, metrics, best ...), JSON-ready; `load` gives it back.
    `group` is a process group on CPU. Parameters are gathered one at a time and written by rank 0. An
    error there (disk full) is raised on every rank, and the checkpoints before stay as they are. `beat` is called
    for each tensor, as a sign of progress; so it is in `load`.
    """
    first = dist.get_rank() == 0
    final = run.checkpoint(step)
    aside = run.checkpoints / f".{final.name}.tmp-{plan.run_id}"
    together(group, partial(_start, run, aside) if first else None)
    prepare(engine)
    random: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(random, get_rng(), group=group)
    parameters = trainable_parameters(engine)
    shapes = {name: full_shape(p) for name, p in parameters.items()}
    files = _files(shapes)
    learned = False
    for file, names in files.items():
        tensors = {}
        for name, kind in product(names, KINDS):
            beat()
            value = read_state(engine, parameters[name], kind)
            if first:
                tensors[f"{kind}/{name}"] = value.to("cpu", copy=True).contiguous()
        together(group, partial(_write_tensors, aside / file, tensors, beat) if first else None)
        learned = learned or any(k.startswith(f"{MASTER}/") and ".lora_B." in k and v.any() for k, v in tensors.items())
        del tensors
    finish_reading(engine)
    if adam_step(engine) > 0:
        together(group, partial(_check_adapter, shapes, learned) if first else None)
    content = {
        **state,
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "adam_step": adam_step(engine),
        "world_size": dist.get_world_size(),
        "zero_stage": engine.zero_optimization_stage(),
        "precision": plan.precision,
        "run_id": plan.run_id,
        "version": plan.version,
        "engine": {"global_steps": engine.global_steps, "skipped_steps": engine.skipped_steps, **loss_scaler(engine)},
        "fingerprint": fingerprint(plan.config, plan.arch),
        "base": base_of(plan),
        "parameters": {name: {"shape": list(shapes[name]), "file": f} for f, names in files.items() for name in names},
    }
    together(group, partial(_finish, run, aside, final, content, random) if first else None)
    return final


def load(
    engine: DeepSpeedEngine,
    folder: Path,
    plan: RunPlan,
    group: ProcessGroup | None = None,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Put a checkpoint into a fresh engine and return its state.json.

    Works at another number of ranks and in another ZeRO stage. Random state returns when the number
    of ranks is the same; otherwise the caller's seeds stay. Raises ConfigError on every rank when the
    checkpoint is damaged or belongs to another model, tuning or data order.
    """
    prepare(engine)
    state: dict[str, Any] = {}
    together(group, lambda: state.update(_load_own(engine, folder, plan, beat)))
    finish_writing(engine, state["adam_step"])
    engine.global_steps = state["engine"]["global_steps"]
    engine.skipped_steps = state["engine"]["skipped_steps"]
    set_loss_scaler(engine, state["engine"])
    if state["world_size"] == dist.get_world_size():
        together(group, lambda: set_rng(read_json(folder / RANDOM_FILE)[dist.get_rank()]))
    return state


def read_masters(folder: Path) -> Iterable[tuple[str, Tensor]]:
    """(name, float32 master) of every trained parameter, read one at a time."""
    return ((name, tensor) for _, name, tensor in _tensors(folder, (MASTER,)))


def rotate(run: RunDir, keep_last: int, best_step: int | None) -> list[Path]:
    """Remove all complete checkpoints but the last `keep_last` and the best; rank 0 only. Returns the removed."""
    complete = complete_checkpoints(run)
    kept = complete[max(0, len(complete) - keep_last) :]
    removed = [c for c in complete if c not in kept and checkpoint_step(c) != best_step]
    for folder in removed:
        (folder / COMPLETE).unlink()  # first, so that a removal cut short leaves no damaged checkpoint
        shutil.rmtree(folder)
    return removed


def _files(shapes: Shapes) -> dict[str, list[str]]:
    """File name -> parameters in it, filled up to SHARD_BYTES."""
    empty = [name for name, shape in shapes.items() if math.prod(shape) == 0]
    if empty or not shapes:
        raise RuntimeError(f"nothing to save: {f'{empty[0]} is empty' if empty else 'no parameter trains'}")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = 4 * len(KINDS) * math.prod(shape)
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return {f"part-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _start(run: RunDir, aside: Path) -> None:
    for left in run.checkpoints.glob(".step-*"):  # of a save that was killed; one process writes to a run
        shutil.rmtree(left)
    aside.mkdir(parents=True)


def share(file: Path) -> None:
    """Let those read a file who may read its folder: safetensors makes files for their owner alone."""
    file.chmod(file.parent.stat().st_mode & 0o666)


def _write_tensors(file: Path, tensors: dict[str, Tensor], beat: Callable[[], None]) -> None:
    """Write, flush to the disk, read back."""
    save_file(tensors, file)
    beat()
    share(file)
    _sync(file)
    with safe_open(file, framework="pt") as written:
        if sorted(written.keys()) != sorted(tensors):
            raise OSError(f"{file} does not hold the tensors that were written")
        for key, tensor in tensors.items():
            beat()
            again = written.get_tensor(key)
            if not again.isfinite().all():
                raise RuntimeError(f"{key} is not finite: training has diverged, and its state is not worth saving")
            if not again.equal(tensor):
                raise OSError(f"{file}: {key} does not read back as it was written")


def _finish(run: RunDir, aside: Path, final: Path, content: dict[str, Any], random: list[Any]) -> None:
    write_atomic(aside / RANDOM_FILE, json.dumps(random))
    written = sorted(f for f in aside.iterdir() if f.is_file())
    serials = [checkpoint_serial(c) for c in complete_checkpoints(run)]
    content["serial"] = 1 + max((s for s in serials if s != math.inf), default=0)
    content["files"] = {f.name: file_entry(f) for f in written}
    text = json.dumps(content, indent=2) + "\n"
    write_atomic(aside / "state.json", text)
    _sync(aside)
    old = final.with_name(f".{final.name}.old")
    if final.exists():  # unfinished, or of a continuation that was abandoned by resuming from before it
        os.rename(final, old)
    os.rename(aside, final)
    write_atomic(final / COMPLETE, hashlib.sha256(text.encode()).hexdigest() + "\n")
    _sync(final)
    _sync(run.checkpoints)
    if old.exists():
        shutil.rmtree(old)


def _check_adapter(names: Iterable[str], learned: bool) -> None:
    """After a step every lora_B has left zero, where it begins; if none has, the adapter is empty."""
    if any(".lora_B." in name for name in names) and not learned:
        raise RuntimeError("every lora_B is zero after training: the adapter changes nothing, and is not worth saving")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load_own(engine: DeepSpeedEngine, folder: Path, plan: RunPlan, beat: Callable[[], None]) -> dict[str, Any]:
    """Read this rank's share of everything; raises before it changes anything."""
    broken = damages(folder)
    if broken:
        raise ConfigError(*(Problem(text, tries=("resume=RUN for the last whole checkpoint",)) for text in broken))
    state: dict[str, Any] = read_json(folder / "state.json")
    parameters = trainable_parameters(engine)
    shapes = {name: full_shape(p) for name, p in parameters.items()}
    saved = {name: tuple(entry["shape"]) for name, entry in state["parameters"].items()}
    now = fingerprint(plan.config, plan.arch)
    problems = misfits(state["fingerprint"], now, str(folder)) or _shape_problems(saved, shapes, folder)
    if problems:
        raise ConfigError(*problems)
    check_base(plan, state, folder)
    for kind, name, tensor in _tensors(folder, KINDS):
        beat()
        write_state(engine, parameters[name], kind, tensor)
    return state


def _tensors(folder: Path, kinds: Iterable[str]) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, parameter, tensor) of a checkpoint, one tensor in memory at a time."""
    parameters = read_json(folder / "state.json")["parameters"]
    for file in sorted({entry["file"] for entry in parameters.values()}):
        with safe_open(folder / file, framework="pt") as tensors:
            for name in (name for name, entry in parameters.items() if entry["file"] == file):
                for kind in kinds:
                    yield kind, name, tensors.get_tensor(f"{kind}/{name}")


def _shape_problems(saved: Shapes, now: Shapes, folder: Path) -> list[Problem]:
    changed = [name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name)]
    if not changed:
        return []
    name = min(changed)
    text = f"{len(changed)} trained parameters differ: {name} is {saved.get(name)} there and {now.get(name)} here"
    return [Problem(text, where=str(folder), tries=("the model and tune.* settings of the checkpoint's run",))]
