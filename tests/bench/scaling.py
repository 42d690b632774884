"""The same work a GPU on 1, 2, 4 and 8 GPUs of this host: speed, memory and time beside what was planned.

    python -m tests.bench.scaling run FOLDER --gpus 1,2,4,8
    python -m tests.bench.scaling predict FOLDER             # the plans alone: no GPU
    python -m tests.bench.scaling table FOLDER [FOLDER ...]  # of runs on several machines
    python -m tests.bench.scaling picture OUT.svg FOLDER [FOLDER ...]

Each run is `python -m launcher` with random weights that are built in place. A work that the planner says does not fit
is skipped with its reason, and one that no longer fits into --deadline, which is for each number of GPUs, is left out.
FOLDER gets the rows, runs/ (their folders without checkpoints), outcomes.jsonl (one line a run, added to), table.txt.
Works, and the goals: tests/bench/scaling_works.py. Columns: tests/bench/scaling_outcomes.py. --small tries everything
on the tiny model with 1 and 2 ranks of the CPU. Exit code 1: a run failed, or nothing was run.
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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError
from launcher.reporting.record import read_record
from launcher.rundir import RunDir
from tests.bench.first_runs import execute, last_words
from tests.bench.scaling_drawing import Panel, drawn
from tests.bench.scaling_outcomes import FORETOLD, LINKS, Outcome, bare, efficiencies, measured, planned, read, table
from tests.bench.scaling_works import NO_MULTICAST, WORKS, Work
from tests.bench.workloads import write_workloads

REPO = Path(__file__).resolve().parents[2]
COUNTS = "1,2,4,8"
PLANNED_KIND, A_HOST = "h200", 8  # GPUs that `predict` plans for, and how many a host has at most
CHECKS_AT_ONCE = 8
DEADLINE_S = 555.0  # of ten minutes: a run that is ended may take half a minute to end


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all runs have in common."""

    folder: Path
    small: bool
    data: dict[str, Path]  # name of a workload -> its rows
    attention: str = "auto"

    def words(self, work: Work, gpus: int, zero: str, *, machine: bool = True) -> list[str]:
        """The command line on this machine, or on one that is invented."""
        where = (
            [f"gpus={gpus}"] if machine else [f"cluster.hostfile={self._hosts(gpus)}", f"cluster.gpu={PLANNED_KIND}"]
        )
        return [*work.words(gpus, zero, self.data[work.data]), f"attention={self.attention}", *where]

    def _hosts(self, gpus: int) -> Path:
        file = self.folder / f"hosts-{gpus}"
        file.write_text("".join(f"planned{n} slots={min(gpus, A_HOST)}\n" for n in range(-(-gpus // A_HOST))))
        return file


@dataclass(frozen=True)
class Ready:
    """A plan that fits."""

    zero: str
    plan: dict[str, Any]


def plan_of(bench: Bench, work: Work, gpus: int, *, machine: bool = True) -> Ready | str:
    """The first setting of a work that fits, else why the last one does not."""
    why = ""
    for zero in work.zeros:
        argv = [sys.executable, "-m", "launcher", "plan", "--json", *bench.words(work, gpus, zero, machine=machine)]
        done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines()]
            why = next(iter(lines[1:2] or lines), f"the plan ended with {done.returncode}").partition(";")[0]
            continue
        plan = json.loads(done.stdout)
        if all(choice["fits"] for choice in plan["choices"] if choice["verdict"] == "chosen"):
            return Ready(zero, plan)
        why = f"needs {sum(plan['memory'].values()) / 2**30:.1f} GiB a GPU with zero={zero}"
    return why


def count_lengths(bench: Bench, works: Iterable[Work], gpus: int, *, machine: bool = True) -> None:
    """Have the launcher count the rows' tokens once, so that plans know them; of works that do not fit nothing."""
    first = {work.lengths: work for work in works if not isinstance(plan_of(bench, work, gpus, machine=machine), str)}

    def check(work: Work) -> None:
        words = bench.words(work, gpus, work.zeros[-1], machine=machine)
        argv = [sys.executable, "-m", "launcher", "check", "data", *words]
        done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{work.name}: lengths are assumed: {(done.stderr or done.stdout).strip()[-300:]}", flush=True)

    with ThreadPoolExecutor(2 if bench.small else CHECKS_AT_ONCE) as pool:
        list(pool.map(check, first.values()))


def run_all(bench: Bench, works: list[Work], gpus: int, deadline: float) -> Iterator[Outcome]:
    """Every work on so many GPUs, one after another, as far as the time goes."""
    for work in works:
        ready, left = plan_of(bench, work, gpus), deadline - time.time()
        if isinstance(ready, str):
            yield bare(work, gpus, "skipped", ready)
            continue
        told = planned(work, gpus, ready.zero, ready.plan)
        needed = work.start_s + work.steps * (told.planned_step_s or 1.0)
        if left < needed:
            yield replace(told, status="left out", note=f"{left:.0f} s left, about {needed:.0f} s needed")
            continue
        yield run_one(bench, work, gpus, ready.zero, min(work.limit_s, left))


def run_one(bench: Bench, work: Work, gpus: int, zero: str, limit_s: float) -> Outcome:
    """The launcher's own command, to its end or for so many seconds."""
    folder = bench.folder / "runs" / f"{work.name.replace(' ', '-').replace(',', '')}-x{gpus}-{time.strftime('%H%M%S')}"
    argv = [sys.executable, "-m", "launcher", *bench.words(work, gpus, zero), f"run.dir={folder}"]
    print(f"{time.strftime('%H:%M:%S')}  {work.name}, {gpus} GPUs, at most {limit_s:.0f} s: {folder}", flush=True)
    folder.parent.mkdir(exist_ok=True)
    begun, ended = execute(argv, folder, limit_s)
    shutil.rmtree(RunDir(folder).checkpoints, ignore_errors=True)
    try:
        outcome = measured(work, gpus, zero, read_record(RunDir(folder)), begun)
    except ConfigError:  # it did not come to a plan
        return bare(work, gpus, "failed", last_words(folder))
    late = f"ended after {ended - begun:.0f} s; " if ended - begun >= limit_s else ""
    return replace(outcome, note=f"{late}{outcome.note}" if late or outcome.note else "")


def measure_links(bench: Bench, gpus: int) -> dict[str, float]:
    """GB/s of all-gathers by size in MiB; {}, the reason printed, where that failed."""
    argv = [sys.executable, "-m", "tests.bench.scaling_links", str(gpus), "cpu" if bench.small else "cuda"]
    try:
        done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=90, check=True)
        found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        print(f"all-gather on {gpus} GPUs: {error} {str(getattr(error, 'stderr', ''))[-300:]}", flush=True)
        return {}
    return found


def keep(file: Path, line: dict[str, Any]) -> None:
    """Add a line."""
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def run(options: argparse.Namespace) -> int:
    """Run what fits, print each line as it is known and the table of all that FOLDER knows."""
    begun = time.time()
    works = _works(options)
    has = 2 if options.small else _gpus_here()
    counts = [gpus for gpus in options.gpus if gpus <= has]
    print(f"{has} GPUs here; to be run on {counts}", flush=True)
    if not counts:
        return 1
    os.environ |= NO_MULTICAST | ({"DS_ACCELERATOR": "cpu"} if options.small else {})
    bench = _bench(options, works, max(counts))
    count_lengths(bench, works, max(counts))
    print(f"{time.time() - begun:.0f} s for rows and their lengths", flush=True)
    outcomes: list[Outcome] = []
    file = bench.folder / "outcomes.jsonl"
    try:
        for gpus in counts:
            if gpus > 1 and (rates := measure_links(bench, gpus)):
                keep(file, {"work": LINKS, "gpus": gpus, "gbs": rates})
            for outcome in run_all(bench, works, gpus, begun + options.deadline):
                outcomes.append(outcome)
                keep(file, asdict(outcome))
                print(table(read([bench.folder])[0], {}, works, only=[outcome]), flush=True)
            begun = time.time()
    finally:
        text = table(*read([bench.folder]), works)
        (bench.folder / "table.txt").write_text(f"{text}\n")
        print(f"\n{text}", flush=True)
    ran = [outcome for outcome in outcomes if outcome.status not in ("skipped", "left out")]
    return int(not ran or any(outcome.status != "done" for outcome in ran))


def predict(options: argparse.Namespace) -> int:
    """Plan every work for every number of GPUs, and print the table."""
    works, counts = _works(options), options.gpus
    bench = _bench(options, works, max(counts))
    count_lengths(bench, works, max(counts), machine=False)
    file = bench.folder / f"{FORETOLD}.jsonl"
    file.unlink(missing_ok=True)
    for work in works:
        for gpus in counts:
            ready = plan_of(bench, work, gpus, machine=False)
            if isinstance(ready, str):
                keep(file, asdict(bare(work, gpus, FORETOLD, ready)))
            else:
                keep(file, asdict(planned(work, gpus, ready.zero, ready.plan)))
    print(table(*read([file]), works))
    return 0


def show(options: argparse.Namespace) -> int:
    """The table of all that was kept."""
    print(table(*read(options.places), WORKS.values()))
    return 0


def picture(options: argparse.Namespace) -> int:
    """Efficiency against GPUs, measured and foretold."""
    outcomes, _ = read(options.places)
    options.out.write_text(drawing(outcomes), encoding="utf-8")
    print(options.out)
    return 0


def drawing(outcomes: list[Outcome]) -> str:
    """The picture of what was measured and foretold; works without either are left out."""
    seen = efficiencies(outcomes, lambda o: o.rate)
    told = efficiencies(sorted(outcomes, key=lambda o: o.status != FORETOLD), lambda o: o.planned_rate)
    panels = []
    for work in WORKS.values():
        own, plan = ({g: share for (name, g), share in found.items() if name == work.name} for found in (seen, told))
        if own or plan:
            panels.append(Panel(name=work.name, seen=own, told=plan, goal=work.scales))
    kinds = sorted({o.versions.partition(",")[0] for o in outcomes if o.versions})
    where = ", ".join(kinds) or PLANNED_KIND.upper()
    said = f"Speed a GPU beside that of the fewest GPUs, the same rows for each GPU; {where}, one host"
    return drawn("Scaling", said, panels)


def _works(options: argparse.Namespace) -> list[Work]:
    chosen: list[Work] = options.works
    if options.small:
        chosen = [work.small() for work in chosen]
    return [replace(work, rows=options.rows) for work in chosen] if options.rows else chosen


def _counts(text: str) -> list[int]:
    """Numbers of GPUs; ValueError is answered by argparse."""
    counts = [int(count) for count in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a count of GPUs is 1 or more")
    return counts


def _named(text: str) -> list[Work]:
    if unknown := [name for name in text.split(",") if name not in WORKS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: there is {', '.join(WORKS)}")
    return [WORKS[name] for name in text.split(",")]


def _bench(options: argparse.Namespace, works: list[Work], most: int) -> Bench:
    """Writes the rows: two steps' for all GPUs."""
    folder = options.folder.resolve()
    rows = 2 * most * max(work.rows for work in works)
    data = write_workloads(folder / "data", rows)
    return Bench(folder=folder, small=options.small, data=data, attention=options.attention)


def _gpus_here() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, do in {"run": run, "predict": predict}.items():
        verb = verbs.add_parser(name)
        verb.set_defaults(do=do)
        verb.add_argument("folder", type=Path)
        verb.add_argument(
            "--gpus", type=_counts, default=COUNTS, help="numbers with commas; more than there are is left out"
        )
        verb.add_argument(
            "--works", type=_named, default=",".join(WORKS), help=f"of {', '.join(WORKS)}, the most wanted first"
        )
        verb.add_argument("--rows", type=int, help="a GPU and optimizer step; default: each work's own")
        verb.add_argument("--attention", default="auto", help="a kernel for all, which must be installed")
        verb.add_argument("--small", action="store_true", help="the tiny model on the CPU")
        verb.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for each number of GPUs")
    shown = verbs.add_parser("table")
    shown.set_defaults(do=show)
    pictured = verbs.add_parser("picture")
    pictured.set_defaults(do=picture)
    pictured.add_argument("out", type=Path)
    for verb in (shown, pictured):
        verb.add_argument("places", type=Path, nargs="+", help="folders, or files of JSON lines")
    return parser.parse_args()


def main() -> int:
    """Parse and do."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = _options()
    code: int = options.do(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
