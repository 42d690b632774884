"""Seconds from the command to the end of the first optimizer step: `deepspeed` with transformers and peft against ours.

    python -m tests.bench.start_up MODEL_FOLDER OUT --gpus 1 --zero zero2

Both train LoRA (r 8) on the same chats, one a rank, from the same weight files. MODEL_FOLDER holds config.json and
safetensors; a tokenizer is put into it when it has none. The two take turns. States: a cold start is one after the page
cache has given up the files of the model and of Python's packages; both it and a warm one find Triton's cache empty,
a kept one finds there what the tool's start before it has compiled. What our ranks keep of transformers' import is
there in all but the very first (CACHE/launcher/imports).

Physics: an interpreter that imports torch, transformers, peft and deepspeed takes `import s` below. The peer pays the
part of torch and deepspeed three times in a row (`deepspeed`, its node launcher, each rank), we once, and less of it.
So 5x needs weights and the first step to be small against imports; the stage table shows what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from launcher.rundir import RunDir

REPO = Path(__file__).resolve().parents[2]
PEER = Path(__file__).with_name("start_up_peer.py")
FIRST_LINE = Path(__file__).with_name("at_start")
LIMIT_S = 600.0
IMPORTS = "import torch, deepspeed, peft; from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration"
OURS = (
    *("task=sft", "loss=cross_entropy", "dataset=jsonl", "tune=lora", "tune.r=8"),
    *("train.max_steps=1", "optim.warmup_steps=0", "eval.every_steps=null", "eval.at_start=false"),
    *("checkpoint.every_epoch=false", "checkpoint.at_end=false", "checkpoint.export=false"),
)


@dataclass(frozen=True)
class Start:
    """When each stage was over, in seconds after the command."""

    stages: dict[str, float]
    said: tuple[str, ...] = ()  # what our rank 0 says of reading weights and of what it does beside

    @property
    def first_step_s(self) -> float:
        """The whole."""
        return max(self.stages.values())


def peer(options: argparse.Namespace, folder: Path) -> Start:
    """DeepSpeed's command on the script beside this one."""
    marks = folder / "marks.jsonl"
    program = Path(sys.executable).with_name("deepspeed")
    head = [str(program)] if program.exists() else [sys.executable, "-m", "deepspeed.launcher.runner"]
    argv = [
        *head,
        "--num_gpus",
        str(options.gpus),
        str(PEER),
        options.model,
        str(options.rows),
        str(marks),
        options.zero,
    ]
    begun = _run(argv, folder, {"TRITON_CACHE_DIR": str(options.out / "triton.peer")})
    return Start({line["stage"]: line["time"] - begun for line in _lines(marks)})


def ours(options: argparse.Namespace, folder: Path) -> Start:
    """Our command on the same files."""
    run, times = RunDir(folder / "run"), folder / "times"
    times.mkdir()
    words = {
        "model.path": options.model,
        "model.weights": "pretrained",
        "dataset.train": options.rows,
        "gpus": options.gpus,
        "zero": f"stage{options.zero[-1]}",
        "batch.global_size": options.gpus,
        "run.dir": run.path,
    }
    argv = [sys.executable, "-m", "launcher", *OURS, *(f"{key}={value}" for key, value in words.items()), *options.set]
    up = time.time() - time.monotonic()
    more = {"PYTHON_BENCH_FIRST_LINE": str(times), "TRITON_CACHE_DIR": str(options.out / "triton.ours")}
    begun = _run(argv, folder, more)
    phases = {line["phase"]: line["time"] - begun for line in _lines(run.events) if line["event"] == "phase"}
    first = max(float(file.read_text()) for file in times.iterdir()) + up - begun
    (step,) = (line["time"] - begun for line in _lines(run.metrics) if line.get("step") == 1 and line["kind"] == "step")
    log = next(run.logs.glob("*.0.log")).read_text()
    return Start(
        {
            "plan, preflight, data check, node launcher": first,
            "import torch": phases["reading data"],
            "rows, other imports, process group": phases["loading model"],
            "model and weights, adapters": phases["starting DeepSpeed"],
            "deepspeed.initialize": phases["training"],
            "first step": step,
        },
        said=tuple(line for line in log.splitlines() if line.startswith(("weights:", "kernels:", "warm-up:"))),
    )


TOOLS = {"peer": peer, "ours": ours}


def _run(argv: Sequence[str], folder: Path, more: dict[str, str]) -> float:
    """Run a command to its end; when it began. Raises RuntimeError with the end of what it said."""
    path = os.pathsep.join([str(REPO), str(FIRST_LINE), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PYTHONPATH": path, "PATH": programs, "HF_HUB_OFFLINE": "1", **more}
    said = folder / "said.txt"
    with open(said, "wb") as out:
        begun = time.time()
        process = subprocess.Popen(argv, cwd=REPO, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    if code != 0:
        logs = "".join(file.read_text()[-2000:] for file in folder.glob("run/logs/*.0.log"))
        raise RuntimeError(f"{argv[0]} left with {code}:\n{said.read_text(errors='replace')[-2000:]}\n{logs}")
    return begun


def _lines(file: Path) -> Iterator[dict]:
    yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())


def forget(model: Path) -> None:
    """Have the page cache give up the model's files and all of Python's packages."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return
    except OSError:
        pass  # not root, or not allowed: file by file
    for root in {model, *(Path(entry) for entry in sys.path if entry.endswith("-packages"))}:
        for file in root.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def prepare(model: Path, out: Path, gpus: int, words: int) -> Path:
    """The rows, and a tokenizer in a folder that has none; the rows' file."""
    if not (model / "tokenizer.json").is_file():
        from launcher.families import FAMILIES
        from launcher.training.processors import build_processor

        arch = json.loads((model / "config.json").read_text())
        kind = next(family for family in FAMILIES.values() if family.model_type == arch["model_type"])
        build_processor(arch, family=kind).save_pretrained(model)
    rows = out / "rows.jsonl"
    text = " ".join(["the garden and the river"] * (words // 10))
    chat = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
    rows.write_text(f"{json.dumps(chat)}\n" * max(gpus, 2))
    return rows


def table(found: dict[tuple[str, str], list[Start]]) -> str:
    """A line for each start's stages (seconds each took, medians) and the ratio of the wholes."""
    lines = []
    for (state, tool), starts in found.items():
        lines.append(f"\n{tool}, {state}: {median(start.first_step_s for start in starts):.2f} s to the first step")
        before = 0.0
        for stage in starts[0].stages:
            after = median(start.stages[stage] for start in starts)
            lines.append(f"    {after - before:6.2f}  {stage}")
            before = after
        lines += [f"    {text}" for start in starts[-1:] for text in start.said]
    both = [state for state, tool in found if tool == "ours" and (state, "peer") in found]
    for state in both:
        theirs, own = (median(s.first_step_s for s in found[state, tool]) for tool in ("peer", "ours"))
        lines.append(f"\n{state}: {theirs:.2f} / {own:.2f} s = {theirs / own:.2f}x sooner")
    return "\n".join(lines)


def imports() -> str:
    """Seconds of an interpreter that imports what both tools need, and whose they were."""
    begun, before = time.monotonic(), os.times()
    program = [sys.executable, "-c", f"{IMPORTS}; import sys; print(len(sys.modules))"]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    after, modules = os.times(), done.stdout.split()[-1]
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    return f"{time.monotonic() - begun:.2f} (user {user:.2f}, system {system:.2f}; {modules} modules)"


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path, help="a folder for what the commands write; removed first")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--zero", choices=["zero2", "zero3"], default="zero2")
    parser.add_argument("--states", default="warm,kept,cold", help="caches to start with")
    parser.add_argument("--tools", default="peer,ours")
    parser.add_argument("--imports", action=argparse.BooleanOptionalAction, default=True, help="time them alone first")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--words", type=int, default=400, help="of the chat that each rank trains on")
    parser.add_argument("--set", action="append", default=[], help="another KEY=VALUE for our command")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    options.rows = prepare(Path(options.model), options.out, options.gpus, options.words)
    if options.imports:
        print(f"import s: {imports()} (page cache as it was found)", flush=True)
    found: dict[tuple[str, str], list[Start]] = {}
    for state in options.states.split(","):
        for number in range(options.repeats):
            for tool in options.tools.split(","):
                folder = options.out / f"{state}.{number}.{tool}"
                folder.mkdir()
                if state == "cold":
                    forget(Path(options.model))
                if state != "kept":
                    shutil.rmtree(options.out / f"triton.{tool}", ignore_errors=True)
                try:
                    one = TOOLS[tool](options, folder)
                except RuntimeError as error:
                    print(f"{state} {tool}: {error}", flush=True)
                    continue
                print(f"{state:5} {tool:5} {one.first_step_s:6.2f} s  {'; '.join(one.said)}", flush=True)
                found.setdefault((state, tool), []).append(one)
    print(table(found))


if __name__ == "__main__":
    main()
