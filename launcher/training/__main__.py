"""`python -m launcher.training VERB --plan PLAN`: what the agent starts, once a rank or once a run.

train    one rank of the run; the node launcher sets RANK and the other variables
check    read and check the data; torch is imported with --lengths only
files    list the data files and the images they name
kernels  compile the kernels of the run's steps; a rank starts it beside its imports
evaluate, score, export, golden   a trained model (--weights: a checkpoint or an export) in one process
speed    measure the GPUs of this machine; takes --out and no plan
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path
from typing import NoReturn

from launcher.errors import ExitCode, LauncherError
from launcher.rundir import RunDir
from launcher.spec import RunPlan, plan_from_json
from launcher.streams import take_any_text
from launcher.training.ahead import start_reading
from launcher.training.spared import change_imports, pause_collection, spare_imports
from launcher.training.warmup import start_compiling

FINISHED = ("evaluate", "score", "export", "golden")


def main(argv: list[str] | None = None) -> int:
    """Run a verb; the exit code is the process's."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["speed"]:
        from launcher.training.calibrate import main as speed

        take_any_text()
        return speed(words[1:])
    parser = argparse.ArgumentParser(prog="python -m launcher.training", description=__doc__)
    parser.add_argument("verb", choices=["train", "check", "files", "kernels", *FINISHED])
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the run")
    parser.add_argument("--lengths", action="store_true", help="check: also tokenise every row")
    parser.add_argument("--weights", type=Path, help="a checkpoint, or an export")
    parser.add_argument("--rows", help="score: the file of rows")
    parser.add_argument("--out", type=Path, help="where the result is written")
    parser.add_argument("--tolerance", type=float, help="golden: allowed difference of a score")
    parser.add_argument("--show", type=int, default=0, help="check: print so many training rows as the model sees them")
    options = parser.parse_args(words)
    take_any_text()
    plan = plan_from_json(options.plan.read_text(encoding="utf-8"))
    if options.verb == "check":
        from launcher.training.check import main as check
        from launcher.training.rankstatus import die_with_parent

        die_with_parent()  # nobody waits for the answer of a check whose launcher is gone
        return check(plan, lengths=options.lengths, show=options.show)
    if options.verb == "files":
        from launcher.training.files import main as files

        return files(plan)
    spare_imports(plan)
    change_imports(plan)
    if options.verb == "kernels":
        from launcher.training.precompile import main as compile_kernels
        from launcher.training.rankstatus import die_with_parent

        die_with_parent()
        return compile_kernels(plan)
    if options.verb in FINISHED:
        return _finished(plan, options)
    _train(plan, options.plan)


def _finished(plan: RunPlan, options: argparse.Namespace) -> int:
    """A verb that uses a trained model; its errors are shown as the launcher shows its own."""
    from launcher.training import verbs
    from launcher.training.rankstatus import die_with_parent

    die_with_parent()
    try:
        return verbs.run(plan, options)
    except LauncherError as error:
        print(error.render(), file=sys.stderr)
        return int(error.exit_code)


def _train(plan: RunPlan, plan_file: Path) -> NoReturn:
    from launcher.training import nsys
    from launcher.training.rankstatus import RankStatus

    rank, run = int(os.environ["RANK"]), RunDir(Path(plan.run_dir))
    host = _host_of(plan, rank)
    if plan.transport == "pdsh":  # which brings only some of it here
        os.environ.update({**plan.env, **plan.host_env.get(host, {})})
    status = RankStatus.open(run, rank, host)
    _bind(plan, host, int(os.environ["LOCAL_RANK"]))
    if nsys.is_wanted(plan, rank):
        os._exit(nsys.stand_for(run, rank, status, nsys.command(run, rank, nsys.program())))
    nsys.die_with_guard()
    code = ExitCode.OK
    pause_collection()
    compiling = start_compiling(plan, str(plan_file), int(os.environ["LOCAL_RANK"]))
    start_reading(plan, int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_SIZE", "1")))
    try:
        from launcher.training.loop import train  # torch comes with it

        train(plan, run, status, compiling)
    except Exception as error:
        code = _exit_code(error)
        status.fail(error, code)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: all is written by now, and what the interpreter tears down may wait for ranks that never answer
    # (after an error) or abort in gloo's threads ("terminate called without an active exception", after success).
    os._exit(code)


def _bind(plan: RunPlan, host: str, local_rank: int) -> None:
    """Keep this rank on the processors that the plan gives it; before torch starts threads, which stay where it is."""
    if host not in plan.cores:
        return
    try:
        os.sched_setaffinity(0, plan.cores[host][local_rank])
    except OSError as error:  # the host allows others since: slower, but no reason to fail
        print(f"rank {local_rank} of {host} is not bound to its processors: {error.strerror}", file=sys.stderr)


def _exit_code(error: Exception) -> ExitCode:
    if isinstance(error, LauncherError):
        return error.exit_code
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    return ExitCode.MACHINE if full else ExitCode.TRAINING


def _host_of(plan: RunPlan, rank: int) -> str:
    for host in plan.hosts:
        if rank < host.slots:
            return host.name
        rank -= host.slots
    raise ValueError(f"the plan has {plan.world_size} ranks")


if __name__ == "__main__":
    sys.exit(main())
