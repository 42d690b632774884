"""Where every file of a run lives, and how files appear there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem

COMPLETE = "COMPLETE"
EXPORT = "launcher.json"  # in an export: which run and step it came from, and how its rows are read
SWEEP = "sweep.json"  # in a folder of runs that were started together: what each was and became


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside one run folder. Creating the object touches no file."""

    path: Path

    @property
    def plan(self) -> Path:
        """The RunPlan as JSON: the only thing ranks read."""
        return self.path / "plan.json"

    @property
    def config(self) -> Path:
        """The resolved configuration, for people."""
        return self.path / "config.yaml"

    @property
    def ds_config(self) -> Path:
        """The finished DeepSpeed configuration."""
        return self.path / "ds_config.json"

    @property
    def hostfile(self) -> Path:
        """The hosts of this run in DeepSpeed's grammar."""
        return self.path / "hostfile"

    @property
    def command(self) -> Path:
        """The `deepspeed` lines that start this run without the launcher."""
        return self.path / "command.sh"

    @property
    def overrides(self) -> Path:
        """What was typed, one override a line."""
        return self.path / "overrides.txt"

    @property
    def env(self) -> Path:
        """Environment of every rank, secrets masked."""
        return self.path / "env.txt"

    @property
    def environment(self) -> Path:
        """Versions and machine, as `launcher env` prints them."""
        return self.path / "environment.json"

    @property
    def data(self) -> Path:
        """What the run's rows are made of and how long they are, as `launcher.prepared` has it."""
        return self.path / "data.json"

    @property
    def logs(self) -> Path:
        """Folder of one log file a rank and one a node launcher."""
        return self.path / "logs"

    def log(self, host: str, rank: int) -> Path:
        """Standard output and error of one rank."""
        return self.logs / f"{host}.{rank}.log"

    def node_log(self, host: str) -> Path:
        """Output of DeepSpeed's node launcher, and of ranks before they open their own log."""
        return self.logs / f"{host}.node.log"

    @property
    def ranks(self) -> Path:
        """Folder of one small JSON file a rank: process id, state, last step, error."""
        return self.path / "ranks"

    def rank(self, rank: int) -> Path:
        """State of one rank, see `launcher.training.rankstatus`."""
        return self.ranks / f"{rank}.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: steps and evaluations."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One JSON object a line: what happened and when."""
        return self.path / "events.jsonl"

    @property
    def monitor(self) -> Path:
        """One JSON object a line: what GPUs, memory and network of each host did, every few seconds."""
        return self.path / "monitor.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """Folder of what profilers wrote."""
        return self.path / "profile"

    @property
    def slurm(self) -> Path:
        """Folder of the batch job that runs it: script, words, output; there before the run is."""
        return self.path / "slurm"

    @property
    def used(self) -> bool:
        """Whether the folder holds a run, or anything but the batch job that is to start one."""
        return self.path.exists() and (
            not self.path.is_dir() or any(path != self.slurm for path in self.path.iterdir())
        )

    @property
    def report(self) -> Path:
        """The page for people, made anew by `launcher report RUN`."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints; only those with a COMPLETE mark count."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint written after `step` optimizer steps."""
        return self.checkpoints / f"step-{step:06d}"

    @property
    def export(self) -> Path:
        """The finished model as a Hugging Face folder."""
        return self.path / "export"

    @property
    def fusion(self) -> Path:
        """The logistic model of dataset.video.fuse=logistic, fitted at the last evaluation."""
        return self.path / "fusion.json"

    @property
    def outcome(self) -> Path:
        """How the run ended; written last, by the supervisor."""
        return self.path / "outcome.json"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old content or all of the new one.

    Example:
        >>> import tempfile; p = Path(tempfile.mkdtemp()) / "a.txt"
        >>> write_atomic(p, "whole"); p.read_text()
        'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file written by `write_json`."""
    return json.loads(path.read_text(encoding="utf-8"))


def append_json(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line; a single write, so that readers never see half a line's start."""
    line = json.dumps(value, ensure_ascii=False) + "\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)


def is_complete(folder: Path) -> bool:
    """Whether `folder` was written to its end."""
    return (folder / COMPLETE).is_file()


CHECKPOINT_FORMAT = 1
HASHED_BYTES = 64 * 2**20  # files up to this size are verified by content, larger ones by size


def checkpoint_step(folder: Path) -> int | None:
    """Step in a checkpoint folder's name, None when the name is not one of a checkpoint."""
    match = re.fullmatch(r"step-(\d+)", folder.name)
    return int(match[1]) if match else None


def checkpoint_serial(checkpoint: Path) -> float:
    """How many saves the run had made with this one; infinite when state.json can't be read.

    So a damaged checkpoint is looked at first, and not passed over without a word.
    """
    try:
        return int(read_json(checkpoint / "state.json")["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf


def complete_checkpoints(run: RunDir) -> list[Path]:
    """Folders with a COMPLETE mark, last saved last.

    That order is the step's, unless the run was once resumed from an earlier step: then what it saved
    since comes after the checkpoints of the abandoned continuation.
    """
    if not run.checkpoints.is_dir():
        return []
    found = [f for f in run.checkpoints.iterdir() if checkpoint_step(f) is not None and is_complete(f)]
    return sorted(found, key=lambda folder: (checkpoint_serial(folder), checkpoint_step(folder)))


def checkpoint_to_export(run: RunDir) -> Path:
    """The best checkpoint by `eval.metric` when it is there, else the last one; raises ConfigError without any."""
    complete = complete_checkpoints(run)
    if not complete:
        raise ConfigError(
            Problem(f"{run.checkpoints} holds no complete checkpoint", tries=(f"python -m launcher status {run.path}",))
        )
    best = read_json(complete[-1] / "state.json").get("best")
    if best is not None and is_complete(run.checkpoint(best["step"])):
        return run.checkpoint(best["step"])
    return complete[-1]


def check_export_place(out: Path) -> None:
    """Raise ConfigError where an export to `out` would overwrite anything but an earlier export."""
    if out.exists() and not out.is_dir():
        raise ConfigError(Problem(f"{out} is a file; an export is a folder", tries=("--out ANOTHER",)))
    if out.exists() and any(out.iterdir()) and not (out / EXPORT).is_file():
        text = f"{out} is not empty and no export of this launcher; nothing is overwritten"
        raise ConfigError(Problem(text, tries=("--out ANOTHER",)))


def damages(checkpoint: Path) -> list[str]:
    """What is missing or changed in a checkpoint folder, each with its file; empty when it is whole."""
    mark, state_file = checkpoint / COMPLETE, checkpoint / "state.json"
    if not mark.is_file():
        return [f"{checkpoint / COMPLETE} is missing: the save did not finish"]
    if not state_file.is_file():
        return [f"{state_file} is missing"]
    content = state_file.read_bytes()
    if hashlib.sha256(content).hexdigest().encode() != mark.read_bytes().strip():
        return [f"{state_file} is not what was written ({len(content)} bytes)"]
    state = json.loads(content)
    if state["format"] != CHECKPOINT_FORMAT:
        return [f"{state_file} has format {state['format']}, this version reads {CHECKPOINT_FORMAT}"]
    return [text for name, entry in state["files"].items() if (text := _file_damage(checkpoint / name, entry))]


def resolve_resume(where: Path) -> tuple[Path, dict[str, Any]]:
    """The whole checkpoint that `resume=where` means, and its state.json plus `notes` for the reader.

    A run folder means its last whole checkpoint; damaged and unfinished ones are passed over with a
    note. A checkpoint folder means itself. Raises ConfigError when there is nothing whole: training
    never starts from the beginning when a resume was asked for.
    """
    if not where.is_dir():
        raise _no_resume(f"resume={where}: {'not a folder' if where.exists() else 'no such folder'}", *_FROM_START)
    if checkpoint_step(where) is not None:
        broken = damages(where)
        if broken:
            before = [c for c in complete_checkpoints(RunDir(where.parent.parent)) if c != where and not damages(c)]
            instead = [f"resume={folder}" for folder in before[-1:]]
            raise _no_resume(f"resume={where} is damaged:\n" + "\n".join(broken), *instead, *_FROM_START)
        return where, {**read_json(where / "state.json"), "notes": []}
    run = RunDir(where.parent) if where.name == "checkpoints" else RunDir(where)
    notes = [f"{folder} is not finished and is passed over" for folder in _unfinished(run)]
    for folder in reversed(complete_checkpoints(run)):
        broken = damages(folder)
        if not broken:
            return folder, {**read_json(folder / "state.json"), "notes": notes}
        notes.append(f"{folder} is damaged and is passed over: " + "; ".join(broken))
    text = "\n".join([f"resume={where}: no whole checkpoint in {run.checkpoints}", *notes])
    raise _no_resume(text, "run.name=ANOTHER, without resume, to train from the beginning")  # the folder is taken


def file_entry(file: Path) -> dict[str, Any]:
    """Size, and for small files the SHA-256, as state.json keeps them."""
    size = file.stat().st_size
    return {"bytes": size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest() if size <= HASHED_BYTES else None}


def _file_damage(file: Path, entry: dict[str, Any]) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    if file.stat().st_size != entry["bytes"]:
        return f"{file} has {file.stat().st_size} bytes, {entry['bytes']} were written"
    return None if file_entry(file) == entry else f"{file} is not what was written"


def _unfinished(run: RunDir) -> list[Path]:
    if not run.checkpoints.is_dir():
        return []
    return sorted(f for f in run.checkpoints.iterdir() if f.name.lstrip(".").startswith("step-") and not is_complete(f))


_FROM_START = ("leave resume out to train from the beginning",)


def _no_resume(text: str, *tries: str) -> ConfigError:
    return ConfigError(Problem(text, tries=tries))
