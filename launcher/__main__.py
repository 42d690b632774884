"""`python -m launcher [VERB] ...`: a verb and its words -> one call; the exit code says who must act."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launcher import __version__
from launcher.errors import ConfigError, ExitCode, LauncherError, MachineError, Problem
from launcher.streams import fitted, silence, take_any_text

if TYPE_CHECKING:
    from launcher.planning.config import Composed
    from launcher.rundir import RunDir
    from launcher.spec import RunPlan

_LOOK = ("status", "logs", "stop", "env", "report", "evaluate", "score", "export")
_JOB = "--job-of-a-sweep"  # its words come on standard input; for running/sweep.py only
_SLURM_JOB = "--slurm-job"  # before the folder of a batch job; for its script only
_DETACHED = "--detached-job"  # likewise, with more beside them; for running/detach.py only
# What a disk or file system refuses: somebody must mend the machine, not the launcher.
_REFUSED = {"EACCES", "EDQUOT", "EIO", "ELOOP", "ENAMETOOLONG", "ENOSPC", "EPERM", "EROFS", "ESTALE"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    _have_home()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except LauncherError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        silence(sys.stdout)  # the reader (head, less) has gone
        return int(ExitCode.OK)
    except Exception as error:
        if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in _REFUSED:
            silence(sys.stdout)  # it may be what cannot be written
            tries = ("check that path: free space, permission, mount",)
            return _refuse(MachineError(Problem(str(error), tries=tries), title="with this machine"))
        if isinstance(error, ModuleNotFoundError) and not (error.name or "launcher").startswith("launcher"):
            tries = (". .venv/bin/activate   (the environment that `make setup` creates)",)
            problem = Problem(f"{sys.executable} lacks the package {error.name}", tries=tries)
            return _refuse(MachineError(problem, title="with this machine"))
        import traceback

        traceback.print_exc()
        print(f"internal error: {type(error).__name__}: {error}\nThis is a mistake of the launcher.", file=sys.stderr)
        return int(ExitCode.INTERNAL)


def _refuse(error: LauncherError) -> int:
    """Print an error that a person may see; its exit code, whether or not somebody reads."""
    try:
        print(fitted(error.render(), sys.stderr), file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)
    return int(error.exit_code)


def _open_streams() -> None:
    """Give a closed standard stream (`>&-`) a place to go, and print any text in any encoding."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    take_any_text()


def _have_home() -> None:
    """Give a user who has no home folder, neither in HOME nor in the system's list, the one that Docker gives."""
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = "/"


def _dispatch(words: list[str]) -> int:
    if words == [_JOB]:
        import json

        return _run_verb(json.load(sys.stdin))  # a command line would show its secrets to everyone
    if words == [_DETACHED]:
        import json

        from launcher.running.detach import leaver

        order = json.load(sys.stdin)
        return _start(order["words"], started=leaver(order))
    if words[:1] == [_SLURM_JOB]:
        from pathlib import Path

        from launcher.running.slurm_job import run_job

        return run_job(Path(words[1]), _start)
    verb, rest = _split_verb(words)
    if verb == "version":
        print(f"launcher {__version__}")
        return int(ExitCode.OK)
    return _VERBS[verb](rest)


def _split_verb(words: list[str]) -> tuple[str, list[str]]:
    """The verb and the words after it; without a verb it is `run`."""
    if words[:1] and words[0] in _LOOK:
        return words[0], words[1:]  # they have help of their own
    if "--help" in words or "-h" in words:
        return "help", []
    if words[:1] == ["--version"]:
        return "version", []
    if words[:1] and words[0] in ("-m", "--multirun"):
        verb, rest = _split_verb(words[1:])
        return verb, [words[0], *rest]
    if not words or words[0].startswith("-") or "=" in words[0]:
        return "run", words
    if words[0] in _VERBS:
        return words[0], words[1:]

    from launcher.planning import foreign

    if foreign.split(words).verb:
        return "run", words  # `swift sft --lora_rank 8`: each flag is answered
    _refuse_verb(words[0])
    return "run", words  # a misplaced word, answered with the other problems


def _refuse_verb(word: str) -> None:
    """Raise ConfigError when `word` was meant as a verb."""
    from launcher.planning import foreign, habits, keys

    near = keys.nearest(foreign.plain(word), [*_VERBS, *habits.VERBS], cutoff=0.7)
    if near and (word not in keys.groups() or word in habits.VERBS):
        ours = habits.VERBS.get(near, near)
        more = "" if ours.startswith("--") else " ..."
        raise ConfigError(Problem(f"there is no verb {word}", tries=(f"python -m launcher {ours}{more}",)))


def _plan(words: Sequence[str], *, trains: bool = True) -> tuple[Composed, RunPlan]:
    """Compose and plan. Raises ConfigError with every problem found; this machine's limits count where it `trains`."""
    from dataclasses import replace
    from datetime import datetime, timezone

    from launcher.planning.config import read_config

    composed = read_config(words)

    from launcher.planning.plan import make_plan  # after the words: a wrong one is answered without it
    from launcher.running.facts import gather_facts

    facts = gather_facts(composed.config)
    if not trains:  # a login node fetches for larger machines
        facts = replace(facts, ram_bytes=None, disk_free_bytes=None, lacking=None, lacks_bits=False)
    return composed, make_plan(composed.config, facts, now=datetime.now(timezone.utc))


def _run_verb(words: list[str]) -> int:
    from launcher.planning.overrides import is_sweep

    if "--detach" in words:
        from launcher.running import detach

        words = [word for word in words if word != "--detach"]
        if is_sweep(words):
            raise detach.refuse_sweep()
        return detach.start_detached(words, [sys.executable, "-m", "launcher", _DETACHED])
    if is_sweep(words):
        from launcher.running.sweep import run_sweep

        return run_sweep(words, [sys.executable, "-m", "launcher", _JOB])
    return _start(words)


def _start(words: Sequence[str], **hooks: Callable[[RunDir], None]) -> int:
    """Plan one run and stay with it to its end."""
    composed, plan = _plan(words)

    from launcher.running.start import run_plan

    return run_plan(plan, config_yaml=composed.yaml, overrides=list(composed.overrides), **hooks)


def _plan_verb(words: list[str]) -> int:
    from launcher.planning.overrides import is_sweep

    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    if is_sweep(words):
        return _plan_sweep(words, as_json)
    _, plan = _plan(words)
    if as_json:
        import json

        print(json.dumps(plan_data(plan), indent=2, ensure_ascii=False))
    else:
        from launcher.planning.describe import describe

        print(describe(plan))
        from launcher.running.slurm import is_for_queue, preview

        if is_for_queue(plan):
            print(f"\nThe job that is submitted\n{preview(plan)}", end="")
    return int(ExitCode.OK)


def _plan_sweep(words: list[str], as_json: bool) -> int:
    from launcher.planning.sweeps import describe_jobs
    from launcher.running.sweep_plan import plan_sweep

    planned = plan_sweep(words)
    if as_json:
        import json

        jobs = [
            {"number": job.number, "differs": dict(job.differs), "plan": plan_data(planned.plans[job.number])}
            for job in planned.jobs
            if job.number in planned.plans
        ]
        print(json.dumps({"jobs": jobs}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(describe_jobs(planned.jobs, planned.plans, planned.invalid)))
    return int(ExitCode.CONFIG if planned.invalid else ExitCode.OK)


def plan_data(plan: RunPlan) -> dict[str, Any]:
    """The plan for programs: all of it, `world_size` beside it, secrets masked."""
    from launcher.plain import to_data
    from launcher.planning.secrets import masked

    data: dict[str, Any] = {"world_size": plan.world_size, **to_data(plan)}
    data["env"] = masked(data["env"])
    data["host_env"] = {host: masked(env) for host, env in data["host_env"].items()}
    data["config"]["env"]["set"] = masked(data["config"]["env"]["set"])
    return data


def _config_verb(words: list[str]) -> int:
    from launcher.planning.help import config_text
    from launcher.planning.overrides import take_config_dirs

    rest, folders, problems = take_config_dirs(words)
    if len(rest) > 1:
        problems.append(Problem("config takes one group", tries=(f"python -m launcher config {rest[0]}",)))
    if problems:
        raise ConfigError(*problems)
    print(config_text(folders, rest[0] if rest else None), end="")
    return int(ExitCode.OK)


def _check_verb(words: list[str]) -> int:
    if words[:1] == ["hosts"]:
        from launcher.running.host_table import check_hosts

        return check_hosts(_plan(words[1:])[1])
    if words[:1] == ["speed"]:
        return _check_speed(words[1:])
    if words[:1] != ["data"]:
        tries = tuple(f"python -m launcher check {what}" for what in ("data ...", "hosts ...", "speed"))
        raise ConfigError(Problem("check what? Data, hosts or speed", tries=tries))
    import subprocess
    import tempfile
    from pathlib import Path

    from launcher.spec import plan_to_json

    words, show = _take_show(words[1:])
    _, plan = _plan(words, trains=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        file.write_text(plan_to_json(plan), encoding="utf-8")
        command = [sys.executable, "-m", "launcher.training", "check", "--lengths", "--plan", str(file), *show]
        code = subprocess.run(command, check=False).returncode
    return code if code >= 0 else int(ExitCode.INTERNAL)


def _check_speed(words: list[str]) -> int:
    import subprocess

    from launcher.measured import speed_file

    if words:
        text = f"{' '.join(words)}: check speed measures the GPUs of this machine, whatever a run is"
        raise ConfigError(Problem(text, tries=("python -m launcher check speed",)))
    command = [sys.executable, "-m", "launcher.training", "speed", "--out", str(speed_file())]
    code = subprocess.run(command, check=False).returncode
    return code if code >= 0 else int(ExitCode.INTERNAL)


def _take_show(words: list[str]) -> tuple[list[str], list[str]]:
    """The words without `--show N`, and these as the trainer's program takes them."""
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--show"), None)
    if at is None:
        return words, []
    _, given, value = words[at].partition("=")
    end = at + 1 if given else at + 2
    value = value if given else "".join(words[at + 1 : end])
    if not value.isdecimal() or int(value) < 1:
        text = f"{' '.join(words[at:end])}: --show takes a number of rows, 1 or more"
        raise ConfigError(Problem(text, tries=("python -m launcher check data ... --show 3",)))
    return [*words[:at], *words[end:]], ["--show", value]


def _fetch_verb(words: list[str]) -> int:
    _, plan = _plan(words, trains=False)

    from launcher.running import fetch

    return fetch.main(plan, sys.stdout)


def _resume_verb(words: list[str]) -> int:
    from pathlib import Path

    from launcher.planning.resumed import resumed_words

    if words and not words[0].startswith("-") and not Path(os.path.expanduser(words[0])).exists():
        from launcher.running.state import find_folder

        words = [str(find_folder(words[0], "runs").path), *words[1:]]  # a run's name, or `latest`
    flags = [word for word in words if word == "--detach"]
    return _run_verb([*resumed_words([word for word in words if word not in flags]), *flags])


def _watch_verb(verb: str) -> Callable[[list[str]], int]:
    def look(words: list[str]) -> int:
        from launcher.running import watch

        return watch.main(verb, words)

    return look


def _trained_verb(verb: str) -> Callable[[list[str]], int]:
    def use(words: list[str]) -> int:
        from launcher.running import trained

        return trained.main(verb, words)

    return use


def _env_verb(words: list[str]) -> int:
    from launcher.running import environment

    return environment.main(words)


def _report_verb(words: list[str]) -> int:
    from launcher.reporting import verb

    return verb.main(words)


def _help_verb(words: list[str]) -> int:
    if words:
        return _config_verb(words)
    from launcher.planning.help import help_text
    from launcher.resources import conf_dir

    print(help_text([conf_dir()]), end="")
    return int(ExitCode.OK)


_VERBS: dict[str, Callable[[list[str]], int]] = {
    "run": _run_verb,
    "plan": _plan_verb,
    "config": _config_verb,
    "check": _check_verb,
    **{verb: _watch_verb(verb) for verb in ("status", "logs", "stop")},
    "fetch": _fetch_verb,
    "resume": _resume_verb,
    "report": _report_verb,
    **{verb: _trained_verb(verb) for verb in ("evaluate", "score", "export")},
    "env": _env_verb,
    "help": _help_verb,
}


if __name__ == "__main__":
    sys.exit(main())
