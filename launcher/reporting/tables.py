"""The tables of a run's page: evaluations, ranks, machines, environment, files."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from launcher.reporting import words
from launcher.reporting.numbers import PARTS, column, steady_steps
from launcher.reporting.record import Record, known, number, numbers, part_of
from launcher.reporting.table import Table
from launcher.reporting.timing import by_rank, phase_seconds, step_shares
from launcher.rundir import read_json
from launcher.running.failures import tail_lines
from launcher.running.journal import Line, best_of, eval_scores, read_quietly

SHOWN_EVALS = 12
SHOWN_FILES = 60
TAIL_LINES = 30
SHOWN_TAILS = 4
SHOWN_VALUE = 80
ONE_COLUMN = 8  # rows
IMAGE_VARIABLES = "NVIDIA_"  # of a container image: nothing of a run reads them


def eval_table(record: Record) -> Table:
    """Every evaluation, or the first and the last ones when there are many."""
    names = list(dict.fromkeys(name for line in record.evals for name in eval_scores(line)))
    lines = record.evals
    about = ""
    if len(lines) > SHOWN_EVALS:
        lines = [lines[0], *lines[-(SHOWN_EVALS - 1) :]]
        about = f"The first and the last {SHOWN_EVALS - 1} of {len(record.evals)}."
    rows = [
        [f"{line['step']:,}", *(words.plain(number(eval_scores(line).get(name)), ".4f") for name in names)]
        for line in lines
    ]
    found = [best_of(lines, name) for name in names]
    best = [(lines.index(line), column_) for column_, line in enumerate(found, start=1) if line is not None]
    right = tuple(range(len(names) + 1))
    return Table(
        title="Evaluations",
        head=("step", *names),
        rows=rows,
        right=right,
        best=best if rows else (),
        about=about,
    )


def time_table(record: Record) -> Table:
    """Seconds and share of each phase, and of each part of a step."""
    phases = phase_seconds(record)
    whole = sum(phases.values()) or 1.0
    rows = [[name, words.duration(value), words.percent(value / whole)] for name, value in phases.items()]
    return Table(title="Time per phase", head=("phase", "time", "share"), rows=rows, right=(1, 2), folded=True)


def step_table(record: Record) -> Table:
    """Mean seconds of a step's parts."""
    title = "Parts of a step"
    lines = [
        line for line in steady_steps(record) if all(number(line.get(key)) is not None for key in (*PARTS, "step_s"))
    ]
    if not lines:
        return Table(title=title)
    mean = statistics.fmean(known(column(lines, "step_s")))
    rows = [[name, words.seconds(share * mean), words.percent(share)] for name, share in step_shares(lines).items()]
    return Table(title=title, head=("part", "mean", "share"), rows=rows, right=(1, 2), folded=True)


def rank_table(record: Record) -> Table:
    """One row a rank: where it is, its times and tokens, how often it was the slowest."""
    lines = [line for line in steady_steps(record) if part_of(line, "ranks")]
    forward, backward, wait = (by_rank(lines, key) for key in ("forward_s", "backward_s", "data_wait_s"))
    tokens, slowest = by_rank(lines, "tokens"), slowest_share(lines)
    rows = []
    for rank in sorted({*record.statuses, *forward}):
        status = record.statuses.get(rank, {})
        error = status.get("error")
        rows.append(
            [
                str(rank),
                str(status.get("host", words.NONE)),
                f"{status.get('state', words.NONE)}, {status.get('phase', words.NONE)}",
                words.count(number(status.get("step"))),
                *(
                    words.seconds(statistics.median(times[rank]) if rank in times else None)
                    for times in (forward, backward, wait)
                ),
                words.count(statistics.fmean(tokens[rank]) if rank in tokens else None),
                words.percent(slowest.get(rank)),
                f"{error.get('type')}: {str(error.get('message'))[:200]}" if isinstance(error, dict) else "",
            ]
        )
    return Table(
        title="Ranks",
        head=(
            "rank",
            "host",
            "state",
            "step",
            "forward",
            "backward",
            "data wait",
            "tokens/step",
            "slowest forward",
            "error",
        ),
        rows=rows,
        right=(0, 3, 4, 5, 6, 7, 8),
        about="Medians of a step. 'Slowest forward': share of the steps in which this rank had the longest forward "
        "pass; ranks that are alike have about the same share.",
        why="No rank has written its state.",
    )


def slowest_share(lines: Sequence[Line]) -> dict[int, float]:
    """Rank -> share of steps in which its forward pass took longest; empty for a single rank."""
    counts: dict[int, int] = {}
    seen = 0
    for line in lines:
        times = [time for time in numbers(part_of(line, "ranks").get("forward_s")) if time is not None]
        if len(times) > 1:
            seen += 1
            rank = times.index(max(times))
            counts[rank] = counts.get(rank, 0) + 1
            for other in range(len(times)):
                counts.setdefault(other, 0)
    return {rank: count / seen for rank, count in counts.items()}


def environment_table(record: Record) -> Table:
    """Versions and machine, as they were when the run started."""
    rows = [[name, str(value)] for name, value in read_quietly(record.run.environment).items()]
    rows.sort(key=lambda row: row[0].startswith(IMAGE_VARIABLES))
    if not rows:
        rows = [["launcher", str(record.plan.get("version", words.NONE))]]
    columns = 2 if len(rows) > ONE_COLUMN else 1
    return Table(title="Versions and machine", head=("", ""), rows=rows, cut=SHOWN_VALUE, columns=columns)


def profile_table(record: Record) -> Table:
    """What profilers wrote and how to open it."""
    rows = []
    for event in record.events:
        if event.get("event") == "profile":
            paths = event.get("paths")
            shown = ", ".join(map(str, paths)) if isinstance(paths, list) else words.NONE
            rows.append([str(event.get("tool")), shown, str(event.get("open", ""))])
    why = f"Nothing was written (profile={part_of(record.config, 'profile').get('name', 'none')})."
    return Table(title="Profiles", head=("tool", "files", "open with"), rows=rows, why=why)


def file_table(record: Record) -> Table:
    """What lies in the run folder, folders as a whole."""
    rows = []
    for path in sorted(record.run.path.iterdir()):
        if path.name.startswith(".") or path == record.run.report:
            continue
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        name = f"{path.name}/" if path.is_dir() else path.name
        about = words.plural(len(files), "file") if path.is_dir() else ""
        rows.append([name, words.size(sum(_bytes(file) for file in files)), about])
    return Table(title="Files", head=("name", "size", ""), rows=rows[:SHOWN_FILES], right=(1,))


def texts(record: Record) -> list[tuple[str, str]]:
    """(title, text) of the files worth reading as they are."""
    named = (
        ("What was typed (overrides.txt)", record.run.overrides),
        ("Configuration (config.yaml)", record.run.config),
        ("DeepSpeed (ds_config.json)", record.run.ds_config),
        ("Environment of every rank (env.txt)", record.run.env),
        ("Without the launcher (command.sh)", record.run.command),
    )
    return [(title, text) for title, path in named if (text := _text(path))]


def log_tails(record: Record) -> list[tuple[str, str]]:
    """(file, last lines) of the logs of ranks that failed; of all ranks when nobody knows which one."""
    if record.state in ("done", "stopped") or record.goes_on:
        return []
    failures = (record.outcome or {}).get("failures") or []
    paths: dict[Path, None] = {}
    for failure in failures if isinstance(failures, list) else []:
        host, rank = str(failure.get("host")), failure.get("rank")
        log = record.run.log(host, rank) if isinstance(rank, int) else record.run.node_log(host)
        paths[log if log.is_file() else record.run.logs / Path(str(failure.get("log"))).name] = None
    found = list(paths) or sorted(record.run.logs.glob("*.log"))
    tails = [(path.name, "\n".join(tail_lines(path, TAIL_LINES))) for path in found[:SHOWN_TAILS]]
    return [(name, text) for name, text in tails if text]


def bad_rows(record: Record) -> int | None:
    """Rows that were dropped; None when that was not written down."""
    try:
        found = read_json(record.run.path / "bad_rows.json")
    except (OSError, ValueError):
        return None
    return len(found) if isinstance(found, list) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").rstrip()
    except OSError:
        return ""


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
