"""The verbs `evaluate`, `score` and `export`: find what a run has trained, plan its use here, start the process."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.datafiles import SUFFIXES
from launcher.errors import ConfigError, ExitCode, MachineError, Problem
from launcher.plain import from_data, to_data
from launcher.planning import checks, keys
from launcher.prepared import has_split
from launcher.rundir import (
    EXPORT,
    RunDir,
    check_export_place,
    checkpoint_step,
    checkpoint_to_export,
    complete_checkpoints,
    read_json,
)
from launcher.running.state import LATEST, find_folder, is_sweep, list_runs
from launcher.spec import BatchPlan, CostModel, Host, RunConfig, RunPlan, plan_from_json, plan_to_json
from launcher.weightheaders import damage

RUNS = "runs"
CHANGEABLE = ("dataset.", "model.path", "batch.max_tokens", "task.instruction")
TARGET = "run folder, its name, `latest` (default), a checkpoint or an export"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a person means: a run's checkpoint, or an export, with the plan that made it."""

    plan: RunPlan
    weights: Path  # a checkpoint or an export
    exported: bool


def main(verb: str, argv: Sequence[str]) -> int:
    """Run `evaluate`, `score` or `export`; the exit code. Raises LauncherError."""
    parser = argparse.ArgumentParser(prog=f"python -m launcher {verb}", description=DESCRIPTIONS[verb])
    parser.add_argument("--root", default=RUNS, help="folder of run folders (default: %(default)s)")
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="auto: a GPU if the run had one and one is here",
    )
    _OPTIONS[verb](parser)
    options, words = parser.parse_known_args(list(argv))
    flags = [word for word in words if word.startswith("-")]
    if flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    options.words = words
    return _VERBS[verb](options)


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m launcher evaluate [RUN|CHECKPOINT|EXPORT] [dataset.eval=FILE ...] [options]"
    parser.add_argument(
        "--golden",
        nargs="?",
        const="",
        metavar="URL",
        help="hold an export, or a server of it at URL, to its golden.json",
    )
    parser.add_argument("--tolerance", type=float, help="of a golden score (default: by the export's number format)")
    parser.add_argument(
        "-o", "--out", type=Path, help="file of the result (default: evaluation.json beside the weights)"
    )


def _score_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m launcher score FILE [--model RUN|CHECKPOINT|EXPORT] [dataset.KEY=VALUE ...] [options]"
    parser.add_argument("--model", default=LATEST, help=TARGET)
    parser.add_argument("-o", "--out", type=Path, help="file of the scores (default: FILE's name with .scores.jsonl)")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m launcher export [RUN|CHECKPOINT|EXPORT] [--out FOLDER] [--adapter] [--push NAME/REPO]"
    parser.add_argument("-o", "--out", type=Path, help="the folder to write (default: the run's export)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--merge", action="store_true", help="adapters merged into the weights")
    kinds.add_argument("--adapter", action="store_true", help="the adapter alone, as peft loads it")
    parser.add_argument("--push", metavar="REPO", help="then upload it to the Hugging Face Hub, where it is private")
    parser.add_argument("--public", action="store_true", help="push: to a public repository")


def _evaluate(options: argparse.Namespace) -> int:
    name, words = _target_word(options.words)
    if options.golden is not None:
        return _golden(options, name, words)
    target = find_target(name, options.root)
    plan = usable_plan(target, words, options.device)
    if not has_split(plan.config, "eval"):
        text = f"{name} has no held-out rows: dataset.eval is not given"
        raise ConfigError(Problem(text, tries=(f"python -m launcher evaluate {name} dataset.eval=FILE",)))
    out = options.out or target.weights / "evaluation.json"
    return start("evaluate", plan, "--weights", str(target.weights), "--out", str(out))


def _golden(options: argparse.Namespace, name: str, words: list[str]) -> int:
    if words:
        raise ConfigError(Problem(f"--golden takes no rows: {' '.join(words)}", tries=("leave them out",)))
    folder = _export_of(name, options.root)
    if options.golden:
        from launcher.running.served import check_server

        return check_server(folder, options.golden, options.tolerance)
    plan = usable_plan(find_target(str(folder), options.root), [], options.device)
    allowed = [] if options.tolerance is None else ["--tolerance", str(options.tolerance)]
    return start("golden", plan, "--weights", str(folder), *allowed)


def _score(options: argparse.Namespace) -> int:
    files = [word for word in options.words if not _is_override(word)]
    if len(files) != 1:
        text = f"score which file? {'No file is' if not files else f'{len(files)} are'} named"
        raise ConfigError(Problem(text, tries=("python -m launcher score rows.jsonl",)), title="with this command")
    target = find_target(options.model, options.root)
    plan = usable_plan(target, [word for word in options.words if _is_override(word)], options.device)
    if plan.config.task.name != "rerank":
        text = f"score is for rerankers, and {options.model} was trained with task={plan.config.task.name}"
        raise ConfigError(Problem(text, tries=(f"python -m launcher evaluate {options.model} dataset.eval=FILE",)))
    out = options.out or Path(f"{Path(files[0]).stem}.scores.jsonl")
    if out.exists() and not options.overwrite:
        raise ConfigError(Problem(f"{out} is there already", tries=("--overwrite", "--out OTHER")))
    if files[0].lower().endswith(SUFFIXES) and not Path(files[0]).exists():
        raise ConfigError(Problem(f"{files[0]} does not exist", tries=("python -m launcher score FILE",)))
    plan = _with(plan, dataset=dataclasses.replace(plan.config.dataset, on_bad="skip", max_bad_fraction=1.0))
    return start("score", plan, "--weights", str(target.weights), "--rows", files[0], "--out", str(out))


def _export(options: argparse.Namespace) -> int:
    name, words = _target_word(options.words)
    if words:
        raise ConfigError(Problem(f"export takes no {words[0]}", tries=("python -m launcher export RUN",)))
    if options.push:
        from launcher.running.push import check_push

        check_push(options.push, public=options.public)
    target = find_target(name, options.root, newest=False)
    folder = target.weights
    if not target.exported:
        folder = options.out or RunDir(Path(target.plan.run_dir)).export
        check_export_place(folder)
        merge = options.merge or (target.plan.config.checkpoint.merge and not options.adapter)
        plan = usable_plan(target, [], options.device)
        plan = _with(plan, checkpoint=dataclasses.replace(plan.config.checkpoint, merge=merge))
        code = start("export", plan, "--weights", str(target.weights), "--out", str(folder))
        if code:
            return code
    elif not options.push:
        raise ConfigError(Problem(f"{name} is an export already", tries=("--push NAME/REPO", "a run or a checkpoint")))
    if options.push:
        from launcher.running.push import push

        print(f"pushed: {push(folder, options.push, public=options.public)}")
    return int(ExitCode.OK)


def _is_override(word: str) -> bool:
    return "=" in word and not Path(word).exists()


def _target_word(words: list[str]) -> tuple[str, list[str]]:
    named = [word for word in words if not _is_override(word)]
    if len(named) > 1:
        tries = (f"python -m launcher ... {named[0]}",)
        raise ConfigError(Problem(f"one run, checkpoint or export, not {len(named)}", tries=tries))
    return (named or [LATEST])[0], [word for word in words if _is_override(word)]


def find_target(name: str, root: str, *, newest: bool = True) -> Target:
    """The checkpoint or export that a person means; of a run its best checkpoint by eval.metric, else its last.

    A run that keeps no checkpoint is its export. Raises ConfigError.
    """
    path = Path(os.path.expanduser(name))
    if (path / EXPORT).is_file():
        return _exported(path)
    if checkpoint_step(path) is not None:
        run = RunDir(path.absolute().parent.parent)
        if path.is_dir():
            return _checkpoint(run, path.absolute())
        if there := complete_checkpoints(run):
            raise ConfigError(Problem(f"{path} does not exist", tries=tuple(map(str, there))))

    def usable(run: RunDir) -> bool:
        return bool(complete_checkpoints(run)) or (newest and (run.export / EXPORT).is_file())

    run = _last(root, usable, "checkpoint") if name == LATEST else find_folder(name, root)
    if is_sweep(run):
        text = f"{name} is a sweep; each of its jobs is a run"
        raise ConfigError(Problem(text, tries=(f"{run.path}/0",)))
    if newest and not complete_checkpoints(run) and (run.export / EXPORT).is_file():
        return _exported(run.export)
    return _checkpoint(run, checkpoint_to_export(run).absolute())


def _last(root: str, usable: Callable[[RunDir], bool], what: str) -> RunDir:
    """The last run that has what is needed, said where it is not the last of all; that one where none has it."""
    last = find_folder(LATEST, root)
    run = next(filter(usable, list_runs(root)), last)
    if run.path != last.path:
        print(f"latest: {run.path}, as {last.path} has no {what}", file=sys.stderr)
    return run


def _checkpoint(run: RunDir, folder: Path) -> Target:
    plan = _plan_of(run)
    try:
        classes = read_json(folder / "state.json").get("classes")
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(f"{folder} is damaged: {error}", tries=("another checkpoint",))) from None
    if classes:  # of task=classify: the training rows told them
        plan = _with(plan, task=dataclasses.replace(plan.config.task, classes=classes))
    return Target(plan, folder, exported=False)


def _export_of(name: str, root: str) -> Path:
    path = Path(os.path.expanduser(name))
    if (path / EXPORT).is_file():
        return path

    def usable(run: RunDir) -> bool:
        return (run.export / EXPORT).is_file()

    run = _last(root, usable, "export") if name == LATEST else find_folder(name, root)
    if not usable(run):
        text = f"{run.path} has no export"
        raise ConfigError(Problem(text, tries=(f"python -m launcher export {run.path}",)))
    return run.export


def _plan_of(run: RunDir) -> RunPlan:
    try:
        plan = plan_from_json(run.plan.read_text(encoding="utf-8"))
    except FileNotFoundError:
        text = f"{run.path} has no plan.json: a checkpoint is used in its run's folder"
        raise ConfigError(Problem(text, tries=("an export, which needs no run",))) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(Problem(f"{run.plan} is of another version: {error}")) from None
    return dataclasses.replace(plan, run_dir=str(run.path.absolute()))  # wherever it was moved to


def _exported(folder: Path) -> Target:
    folder = folder.absolute()
    if (damaged := damage(folder)) is not None:
        tries = ("python -m launcher export RUN   (writes it again)", "copy or download that file again")
        raise ConfigError(Problem(str(damaged), tries=tries))
    try:
        return Target(_plan_of_export(folder, read_json(folder / EXPORT)), folder, exported=True)
    except (KeyError, ValueError, TypeError) as error:
        text = f"{folder / EXPORT} is of another version: {type(error).__name__} {error}"
        raise ConfigError(Problem(text, tries=("python -m launcher export RUN",))) from None


def _plan_of_export(folder: Path, mark: dict[str, Any]) -> RunPlan:
    """What an export says of itself, as the plan of a run that trains nothing."""
    settings = mark["settings"]
    model = dict(settings["model"])
    if mark["merged"]:
        model["path"] = str(folder)
    frozen = {"name": "full", "language": "frozen", "vision": "frozen", "projector": "frozen", "head": "frozen"}
    base = to_data(RunConfig())
    given = {**settings, "model": model, "tune": settings.get("tune", frozen)}
    config: RunConfig = from_data(RunConfig, {**base, **{key: {**base[key], **given[key]} for key in given}})
    source = folder if mark["merged"] or config.model.path is None else Path(config.model.path)
    file = source / "config.json"
    return RunPlan(
        run_id=mark["run"],
        created_at="",
        version=mark["version"],
        run_dir=str(folder),
        resume_from=None,
        config=config,
        hosts=(),
        hosts_source="an export",
        hosts_assumed=False,
        transport="local",
        device="cuda",
        gpu_kind=None,
        master_addr="127.0.0.1",
        master_port=None,
        precision=mark["precision"],
        precision_reason="an export",
        attention="auto",
        attention_reason="an export",
        checkpointed_layers=0,
        lr=0.0,
        warmup_steps=None,
        arch=read_json(file) if file.is_file() else {},
        parameters={},
        trainable={},
        batch=BatchPlan(
            global_size=16,
            max_tokens=mark["max_tokens"],
            train_rows=None,
            eval_rows=None,
            steps_per_epoch=None,
            total_steps=None,
            micro_steps=None,
        ),
        cost=from_data(CostModel, mark["cost"]),
        deepspeed={},
        memory={},
        env={},
        host_env={},
        cores={},
        commands={},
    )


def usable_plan(target: Target, words: Sequence[str], device: str) -> RunPlan:
    """The target's plan for one process on this machine, changed by KEY=VALUE words. Raises ConfigError."""
    plan = _changed(target.plan, words)
    here = has_gpu() if device == "auto" else device == "cuda"
    kind = "cuda" if here and (plan.device == "cuda" or device == "cuda") else "cpu"
    model = plan.config.model
    if model.weights == "random" and kind != plan.device:
        text = f"the run began with random weights made on {_kind(plan.device)}, which {_kind(kind)} makes otherwise"
        tries = (f"--device {plan.device}   (on a machine that has one)", "its export, which holds all weights")
        raise ConfigError(Problem(text, tries=tries))
    return dataclasses.replace(
        # Kernels were asked for on the run's GPUs, which these need not be.
        _with(
            plan,
            model=dataclasses.replace(model, adapter=None),
            attention=dataclasses.replace(plan.config.attention, name="auto"),
            train=dataclasses.replace(plan.config.train, kernels="auto"),
            resume=None,
        ),
        hosts=(Host(name="localhost", gpus=(0,)),),
        device=kind,
        attention="auto",
        checkpointed_layers=0,
        deepspeed={},
        resume_from=None,
        version=__version__,
    )


def _kind(device: str) -> str:
    return "a GPU" if device == "cuda" else "a CPU"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be seen from here."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def _changed(plan: RunPlan, words: Sequence[str]) -> RunPlan:
    """With the values that were typed; of those keys that make sense for a trained model."""
    data, problems = to_data(plan.config), []
    typed = {}
    for word in words:
        key, _, text = word.partition("=")
        typed[key] = _value(text)
        problems += _misfits(key, typed[key])
    if problems:
        raise ConfigError(*problems, title="with this command")
    if {"dataset.eval", "dataset.train"} & typed.keys() and data["dataset"]["format"] == "digits":
        typed.setdefault("dataset.format", "auto")
    for key, value in typed.items():
        *sections, name = key.split(".")
        place = data
        for section in sections:
            place = place[section]
        place[name] = value
    config: RunConfig = from_data(RunConfig, data)
    tokens = config.batch.max_tokens if "batch.max_tokens" in typed else plan.batch.max_tokens
    batch = dataclasses.replace(plan.batch, max_tokens=tokens)
    return dataclasses.replace(plan, config=config, batch=batch)


def _value(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _misfits(key: str, value: Any) -> list[Problem]:
    known = [name for name in keys.kinds() if name.startswith(CHANGEABLE)]
    if "." not in key and any(name.startswith(f"{key}.") for name in keys.kinds()):
        text = f"{key}={value} chooses a group of settings, which a run has when it trains; single keys can change"
        return [Problem(text, tries=("dataset.eval=FILE   (rows of any format)",))]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        what = "says how it was trained, and can't be changed now" if key in keys.kinds() else "is no key"
        return [Problem(f"{key} {what}", tries=(f"{near[0]}=...",) if near else ("dataset.eval=FILE",))]
    wrong = checks.type_problem(key, value) or checks.rule_problem(key, value)
    return [Problem(f"{key}={value}: {wrong}", tries=(f"{key}=...",))] if wrong else []


def _with(plan: RunPlan, **parts: Any) -> RunPlan:
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, **parts))


def start(verb: str, plan: RunPlan, *words: str) -> int:
    """Run `python -m launcher.training VERB` to its end, its output on this terminal; its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        file.write_text(plan_to_json(plan), encoding="utf-8")
        command = [sys.executable, "-m", "launcher.training", verb, "--plan", str(file), *words]
        env = {**os.environ, "DS_ACCELERATOR": plan.device}  # or DeepSpeed looks for one, and warns
        code = subprocess.run(command, env=env, check=False).returncode
    if code < 0:
        raise MachineError(Problem(f"the process was killed by signal {-code}: too little memory, perhaps"))
    return code


_VERBS = {"evaluate": _evaluate, "score": _score, "export": _export}
_OPTIONS = {"evaluate": _evaluate_options, "score": _score_options, "export": _export_options}
DESCRIPTIONS = {
    "evaluate": f"Measure a trained model on held-out rows. What is measured: {TARGET}.",
    "score": "Score the rows of a file: one JSON line a row, with P(yes) of each document, in the file's order.",
    "export": f"Write a trained model as a folder that loads elsewhere. What is exported: {TARGET}.",
}
