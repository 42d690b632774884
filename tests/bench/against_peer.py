"""ms-swift and this launcher back to back on the same weights, rows and GPUs: seconds, memory, the same losses.

    python -m tests.bench.against_peer FOLDER --workloads text,page --settings keep+liger+m1 --peer-path SITE

SITE is a folder with ms-swift 4.6.0 and what it needs (pip install --target); only the peer's processes see it. Without
a GPU, --small tries everything on a model of a few numbers. --sides peer measures the peer alone, in all of --settings
(tests/bench/peer.py): the most wanted first, since what no longer fits in --deadline is left out. `--settings best`
takes the fastest that FOLDER has a measurement of.

FOLDER gets the checkpoint (or --model names another place for it), the rows, the logs, outcomes.jsonl (one line a run,
added to) and table.txt. A step is as many rows on both sides; seconds are medians of steps after the first ones, each
side's own clock. Our rows are counted before (`check data`), so that micro-batches are planned for what they hold.
Share of the limit is the least time that the arithmetic of shared prefixes needs at the GPU's rate, over the time
taken; `own` counts what a side computes by its own way of packing: the peer repeats the query for each document. Exit
code 1: a side failed, or the losses differ.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from tests.bench.peer import Setting, read_setting, write_rows
from tests.bench.peer_runs import Bench, Job, Outcome, Peer, count_rows, run_ours, run_peer, start_peer
from tests.bench.peer_table import parity, table
from tests.bench.workloads import write_workloads

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = {"text": 8, "page": 4, "imgq": 8, "chat": 1}
FIRST = "keep+liger+m1"  # where nothing was measured
LEAST_S = 25  # that a run needs


def main() -> int:
    """Prepare, run everything that fits, print the table, compare the losses."""
    options = _options()
    bench = _bench(options)
    deadline = time.time() + options.deadline
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    outcomes: list[Outcome] = []
    rates: dict[str, float] = {}
    try:
        jobs = list(_jobs(options, bench))
        first = next((job for job in jobs if job.setting is not None), None)
        ready = start_peer(first, bench, 0) if first and bench.gpus == 1 else None
        rates = _prepare(bench, options)
        count_rows([job for job in jobs if job.setting is None], bench)
        for outcome in _run_all(jobs, bench, deadline, options.limit, ready):
            outcomes.append(outcome)
            with (bench.folder / "outcomes.jsonl").open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print(table([outcome], rates, heading=len(outcomes) == 1), flush=True)
    finally:
        text = f"{table(outcomes, rates)}\n{parity(outcomes)[1]}"
        (bench.folder / "table.txt").write_text(f"{text}\n")
        print(f"\n{text}", flush=True)
    wanted = [outcome for outcome in outcomes if outcome.side == "launcher" or options.sides == "both"]
    return int(not parity(outcomes)[0] or any(outcome.seconds is None for outcome in wanted))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workloads", default="text,page,imgq", help="of text, page, imgq, chat, with commas")
    parser.add_argument("--settings", default=FIRST, help="of the peer, with commas; text:WORDS is for text alone")
    parser.add_argument("--sides", choices=["both", "peer", "ours"], default="both")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of our command")
    parser.add_argument("--groups", type=int, default=4, help="rows an optimizer step and GPU")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, written when it is not there")
    parser.add_argument("--peer-path", type=Path, action="append", default=[], metavar="SITE")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one run")
    parser.add_argument("--deadline", type=float, default=550, help="seconds for everything")
    return parser.parse_args()


def _bench(options: argparse.Namespace) -> Bench:
    folder = options.folder.resolve()
    return Bench(
        folder=folder,
        model=options.model or folder / "model",
        groups=options.groups * options.gpus,
        steps=options.steps,
        gpus=options.gpus,
        lr=options.lr,
        small=options.small,
        words=tuple(options.set),
        python=options.peer_python,
        path=tuple(str(path.resolve()) for path in options.peer_path),
    )


def _prepare(bench: Bench, options: argparse.Namespace) -> dict[str, float]:
    """Write weights and rows; what products reach on this GPU."""
    files = write_workloads(bench.folder / "data")
    for name, file in files.items():
        out = bench.folder / "data" / f"{name}.swift.jsonl"
        write_rows(file, out, groups=bench.groups, steps=bench.steps, seed=bench.seed)
    small = ["small"] if bench.small else []
    for argv in (["tests.bench.peer_model", str(bench.model), *small], ["tests.bench.products"]):
        done = subprocess.run([sys.executable, "-m", *argv], cwd=REPO, check=True, stdout=subprocess.PIPE, text=True)
        print(done.stdout.strip(), flush=True)
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def _jobs(options: argparse.Namespace, bench: Bench) -> Iterator[Job]:
    """Settings first, so that every workload has been run in the most wanted ones; ours follows a workload's last."""
    settings, workloads = options.settings.split(","), options.workloads.split(",")
    last = {
        workload: number for number, words in enumerate(settings) for workload in workloads if _is_of(words, workload)
    }
    for number, words in enumerate(settings):
        for workload in (workload for workload in workloads if _is_of(words, workload)):
            documents = DOCUMENTS[workload]
            if options.sides != "ours":
                yield Job(workload=workload, documents=documents, setting=_setting(words, workload, bench.folder))
            if options.sides != "peer" and last[workload] == number:
                yield Job(workload=workload, documents=documents, setting=None)


def _is_of(words: str, workload: str) -> bool:
    """Whether a setting is for this workload: text:keep+m2 is for text alone."""
    return words.rpartition(":")[0] in ("", workload)


def _setting(words: str, workload: str, folder: Path) -> Setting:
    text = words.rpartition(":")[2]
    return _best(folder / "outcomes.jsonl", workload) if text == "best" else read_setting(text)


def _best(file: Path, workload: str) -> Setting:
    """The fastest setting of earlier runs."""
    lines = file.read_text().splitlines() if file.is_file() else []
    known = [Outcome(**json.loads(line)) for line in lines]
    timed = {o.setting: o.seconds for o in known if o.workload == workload and o.side == "ms-swift" and o.seconds}
    return read_setting(min(timed, key=lambda name: timed[name]) if timed else FIRST)


def _run_all(jobs: list[Job], bench: Bench, deadline: float, limit_s: float, ready: Peer | None) -> Iterator[Outcome]:
    """One after another; while one runs the next one of the peer loads its libraries."""
    full: list[Job] = []  # those that the GPU's memory did not hold
    waiting = list(jobs)
    number = count(1)
    try:
        while waiting:
            job = waiting.pop(0)
            left = deadline - time.time()
            why = f"{left:.0f} s left" if left < LEAST_S else ""
            why = "a smaller micro-batch did not fit" if any(map(job.needs_more_than, full)) else why
            if why:
                outcome = Outcome(**_named(job, bench), note=f"left out: {why}")
            elif job.setting is None:
                outcome = run_ours(job, bench, min(limit_s, left))
            else:
                peer, ready = _take(ready, job) or start_peer(job, bench, next(number)), None
                following = next((other for other in waiting if other.setting is not None), None)
                if following and bench.gpus == 1:
                    ready = start_peer(following, bench, next(number))
                outcome = run_peer(peer, job, bench, min(limit_s, left))
            if "out of memory" in outcome.note:
                full.append(job)
            yield outcome
    finally:
        if ready:
            ready.end()


def _take(ready: Peer | None, job: Job) -> Peer | None:
    """The waiting process, when it is one for such rows; else it is ended."""
    if ready is not None and ready.documents != job.documents:
        ready.end()
        return None
    return ready


def _named(job: Job, bench: Bench) -> dict[str, Any]:
    side = "launcher" if job.setting is None else "ms-swift"
    return {"workload": job.workload, "side": side, "setting": job.words(bench), "groups": bench.groups}


if __name__ == "__main__":
    sys.exit(main())
