"""`report`: the page of one run, of a sweep, or of several runs beside each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import ConfigError, ExitCode, Problem
from launcher.planning.lines import table
from launcher.reporting.compare import (
    Comparison,
    compare_jobs,
    compare_runs,
    results_table,
    write_comparison,
    write_sweep_report,
)
from launcher.reporting.headline import summary_lines
from launcher.reporting.numbers import summarise
from launcher.reporting.page import write_page
from launcher.reporting.record import read_record
from launcher.rundir import SWEEP, RunDir
from launcher.running.journal import short_path
from launcher.running.state import LATEST, find_folder

RUNS = "runs"
COMPARE = "compare.html"


def main(argv: Sequence[str]) -> int:
    """Write the page that the arguments ask for, print a summary and its path; the exit code. Raises LauncherError."""
    parser = argparse.ArgumentParser(
        prog="python -m launcher report",
        description="A page with plots and tables of one run, or of several beside each other.",
    )
    parser.add_argument("run", nargs="*", default=[LATEST], help="run folder, its name, a sweep, or `latest` (default)")
    parser.add_argument("--root", default=RUNS, help="folder of run folders (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, help=f"where several runs are compared (default: {COMPARE})")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    options = parser.parse_args(list(argv))
    if len(options.run) > 1:
        path = _several(options.run, options.root, options.output or Path(COMPARE))
    else:
        if options.output:
            text = "-o is for the comparison of several runs: one run's page lies in its folder"
            raise ConfigError(Problem(text, tries=("leave -o out",)), title="with this report")
        path = _one(options.run[0], options.root)
    print(f"  {short_path(path)}")
    if options.open:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            print("  no browser was found here; open that file in yours")
    return ExitCode.OK


def _one(name: str, root: str) -> Path:
    sweep = _sweep(name, root)
    if sweep is not None:
        _print_table(compare_jobs(sweep))
        return write_sweep_report(RunDir(sweep))
    record = read_record(find_folder(name, root))
    path = write_page(record)
    print("\n".join(summary_lines(record, summarise(record))))
    return path


def _sweep(name: str, root: str) -> Path | None:
    return next((path for path in (Path(name), Path(root, name)) if (path / SWEEP).is_file()), None)


def _several(names: Sequence[str], root: str, path: Path) -> Path:
    runs: list[RunDir] = []
    for name in names:
        sweep = _sweep(name, root)
        runs += [record.run for record in compare_jobs(sweep).records] if sweep else [find_folder(name, root)]
    comparison = compare_runs(runs)
    write_comparison(comparison, path)
    _print_table(comparison)
    return path


def _print_table(comparison: Comparison) -> None:
    found = results_table(comparison)
    print("\n".join(table([found.head, *found.rows], right=tuple(found.right))))
    print("\n".join(f"  {note}" for note in comparison.notes), end="\n" if comparison.notes else "")
