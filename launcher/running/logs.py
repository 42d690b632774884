"""`logs`: the end of the logs of ranks and hosts, and what is written to them."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from launcher.errors import ConfigError, ExitCode, Problem
from launcher.rundir import RunDir
from launcher.running import queued
from launcher.running.folding import fold, prefixes
from launcher.running.journal import short_path
from launcher.running.state import LATEST, current_job, find_folder, find_state, is_sweep

TAIL_LINES = 20
POLL_S = 0.3
MARKS = ("error", "traceback", "exception", "fatal", "killed", "out of memory", "warning: ")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

Wanted = Callable[[str], bool]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the verb takes besides the run."""
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines are written")
    parser.add_argument("--host", help="only this host: its ranks, its node launcher and its agent")
    parser.add_argument("--rank", type=int, help="only this rank; without it rank 0, or all with --errors and --host")
    parser.add_argument("--errors", action="store_true", help="only lines that tell of an error, of all ranks")
    parser.add_argument("-n", "--lines", type=int, default=TAIL_LINES, help="last lines (default: %(default)s)")


def logs(options: argparse.Namespace) -> int:
    """Print the end of logs, and what is written to them when asked to follow."""
    run = _of_one_run(find_folder(options.run or LATEST, options.root, new=True))

    def files() -> list[Path]:
        return _log_files(run, options.host, options.rank, everything=options.errors)

    if not files() and not (options.follow and not find_state(run).over and _may_come(run, options)):
        raise _nothing(run, options)
    wanted = _is_error if options.errors else _any
    tails = {path: Tail(path, wanted) for path in files()}
    last = {path: tail.last(options.lines, whole=options.follow) for path, tail in tails.items()}
    _print(last, several=len(tails) > 1)
    if options.errors and not any(last.values()):
        print(f"no line in {short_path(run.logs)} tells of an error", file=sys.stderr)
    if options.follow:
        _follow(run, tails, files, wanted)
    return ExitCode.OK


def _may_come(run: RunDir, options: argparse.Namespace) -> bool:
    """Whether a log that is not there may be opened yet: ranks open theirs one by one."""
    return options.host is None or not any(run.logs.glob("*.log"))


def _nothing(run: RunDir, options: argparse.Namespace) -> ConfigError:
    of = [f"of rank {options.rank}"] if options.rank is not None else []
    of += [f"of host {options.host}"] if options.host is not None else []
    names = ", ".join(path.name for path in _sorted(run.logs.glob("*.log"))) or "none"
    text = f"no log {' '.join(of) or 'yet'} in {run.logs}; there: {names}"
    if queued.is_new(run):
        text = f"no output yet in {run.slurm}: {find_state(run).text}"
    return ConfigError(Problem(text), title="with this run")


def _of_one_run(run: RunDir) -> RunDir:
    """The run itself; of a sweep the job that was started last."""
    if not is_sweep(run):
        return run
    job = current_job(run)
    if job is None:
        raise ConfigError(Problem(f"no job of {run.path} has started"), title="with this sweep")
    return job


def _log_files(run: RunDir, host: str | None, rank: int | None, *, everything: bool) -> list[Path]:
    if queued.is_new(run) and host is None and rank is None:
        return [path for path in [run.slurm / "output.txt"] if path.is_file()]
    if host is not None or everything:
        some = run.logs.glob("*.log" if rank is None else f"*.{rank}.log")
        return _sorted(path for path in some if host is None or _host_of(path) == host)
    found = _sorted(run.logs.glob(f"*.{rank or 0}.log"))
    if found or rank is not None:
        return found
    of_job = run.slurm / "output.txt"
    return _sorted(run.logs.glob("*.node.log")) or [path for path in [of_job] if path.is_file()]


def _host_of(path: Path) -> str:
    return path.stem.rpartition(".")[0]


def _sorted(paths: Iterator[Path]) -> list[Path]:
    """By rank; what belongs to a host comes before its first rank."""

    def key(path: Path) -> tuple[str, int, str]:
        host, _, word = path.stem.rpartition(".")
        return host, int(word) if word.isdigit() else -1, word

    return sorted(paths, key=key)


def _any(line: str) -> bool:
    return True


def _is_error(line: str) -> bool:
    lower = line.lower()
    return any(mark in lower for mark in MARKS)


class Tail:
    """One log, read as it grows."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._path, self._wanted = path, wanted
        self._offset = 0  # of what has been read
        self._part = b""  # of a line that is not whole yet

    def last(self, count: int, *, whole: bool) -> list[str]:
        """The last wanted lines; the last of all need not be whole unless `whole`, as more of it may come."""
        kept: deque[str] = deque(maxlen=max(0, count))
        for line in self._lines():
            kept.append(line)
        if not whole:
            kept.extend(self.rest())
        return list(kept)

    def new(self) -> list[str]:
        """The wanted lines that have become whole since."""
        return list(self._lines())

    def rest(self) -> list[str]:
        """A last line without its end."""
        part, self._part = self._part, b""
        return [line for line in [_shown(part)] if part and self._wanted(line)]

    def _lines(self) -> Iterator[str]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                for data in file:  # a log may be larger than memory
                    self._offset += len(data)
                    self._part += data
                    if data.endswith(b"\n"):
                        line, self._part = _shown(self._part), b""
                        if self._wanted(line):
                            yield line
        except FileNotFoundError:
            return


def _shown(data: bytes) -> str:
    """A line as a terminal would show it last: progress bars write over themselves; colours are for terminals."""
    line = data.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
    return line if sys.stdout.isatty() else _ESCAPE.sub("", line)


def _print(found: Mapping[Path, Sequence[str]], *, several: bool) -> None:
    for names, line in fold({path.stem: lines for path, lines in found.items()}):
        print(f"{prefixes(names)}: {line}" if several else line)
    sys.stdout.flush()


def _follow(run: RunDir, tails: dict[Path, Tail], files: Callable[[], list[Path]], wanted: Wanted) -> None:
    """Print new whole lines, also of logs that are opened meanwhile, until the run is over."""
    while True:
        over = find_state(run).over  # looked at first: what was written before it is still printed
        found = files()
        for path in found:
            tails.setdefault(path, Tail(path, wanted))
        new = {path: tails[path].new() for path in found}
        if over:
            new = {path: [*lines, *tails[path].rest()] for path, lines in new.items()}
        _print(new, several=len(tails) > 1)
        if over:
            return
        time.sleep(POLL_S)
