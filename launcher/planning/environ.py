"""The environment of every rank: the launcher's own, this shell's by pattern, a file, single values. All literal."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.facts import Facts, TextFile
from launcher.planning.placement import Placement
from launcher.spec import FORWARDED, RunConfig

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# DeepSpeed's node launcher writes these for each rank, so a value from elsewhere would be lost.
OWNED = {
    "MASTER_ADDR": "cluster.master_addr=ADDRESS",
    "MASTER_PORT": "cluster.master_port=PORT",
    "CUDA_VISIBLE_DEVICES": "gpus=[0,1]",
    "WORLD_SIZE": "gpus=2",
    "LOCAL_SIZE": "gpus=2",
    "RANK": "remove the variable",
    "LOCAL_RANK": "remove the variable",
    "CROSS_RANK": "remove the variable",
    "CROSS_SIZE": "nodes=2",
}
# torch reads either, and with both set its versions do not agree on which: ours is left out when one is there.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
_OURS = "LAUNCHER_"  # what the launcher tells its own processes
_ACCELERATORS = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """What a person gives to every rank, and where each variable came from: forwarded, env.file or env.set."""

    env: Mapping[str, str]
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = field(default=())

    @property
    def cpu_only(self) -> bool:
        """Whether DeepSpeed is told to leave GPUs alone."""
        return self.env.get("DS_ACCELERATOR") == "cpu"


def declare(config: RunConfig, facts: Facts) -> Declared:
    """The last word first: env.set, then env.file, then this shell's. ConfigError with every problem found."""
    forwarded = _forwarded(config.env.forward, facts.environ)
    env, sources = dict(forwarded), dict.fromkeys(forwarded, "forwarded")
    problems: list[Problem] = []
    for where, name, value in _from_file(facts.env_file, problems):
        problems.extend(_unfit(name, value, where))
        env[name], sources[name] = value, "env.file"
    for name, given in config.env.set.items():
        if not NAME.fullmatch(name):
            problems.append(Problem(f"env.set.{name}: not a name of a variable", "", ("env.set.NAME=VALUE",)))
        elif given is not None:
            problems.extend(_unfit(name, _text(given), "env.set"))
            env[name], sources[name] = _text(given), "env.set"
    for name in sorted(env):
        if sources[name] == "forwarded":
            problems.extend(_undecodable(name, env[name], f"unset {name}"))
    chosen = env.get("DS_ACCELERATOR", "cpu")
    if chosen not in _ACCELERATORS:
        text = f"DS_ACCELERATOR={chosen}: runs use NVIDIA's GPUs (cuda) or the CPU (cpu)"
        problems.append(Problem(text, sources["DS_ACCELERATOR"], ("env.set.DS_ACCELERATOR=cuda",)))
    if problems:
        raise ConfigError(*problems)
    return Declared(env=env, sources=sources, warnings=tuple(_warnings(config, facts.environ, forwarded)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """Variables of every rank, by name."""

    env: dict[str, str]
    sources: dict[str, str]  # launcher | nccl | forwarded | env.file | env.set
    reasons: dict[str, str]  # of those that are the launcher's own or nccl's


def rank_environment(
    declared: Declared, facts: Facts, placement: Placement, nccl: Mapping[str, tuple[str, str]] | None = None
) -> RankEnvironment:
    """What was declared, over what NCCL needs, over the launcher's own; `nccl`: variable -> (its value, why)."""
    if placement.device == "cpu" and declared.env.get("DS_ACCELERATOR") == "cuda":
        tries = ("env.set.DS_ACCELERATOR=cpu", "cluster.hostfile=FILE with GPU machines")
        raise ConfigError(Problem(f"DS_ACCELERATOR=cuda, and the run uses the CPU: {placement.source}", "", tries))
    own = {**_own(facts, placement, declared.env), **(nccl or {})}
    env = {**{name: value for name, (value, _) in own.items()}, **declared.env}
    sources = {**dict.fromkeys(own, "launcher"), **dict.fromkeys(nccl or {}, "nccl"), **declared.sources}
    reasons = {name: reason for name, (_, reason) in own.items() if name not in declared.env}
    return RankEnvironment(
        env=dict(sorted(env.items())), sources=dict(sorted(sources.items())), reasons=dict(sorted(reasons.items()))
    )


def parse_env(file: TextFile) -> dict[str, str]:
    """KEY=VALUE lines: `export ` and one enclosing pair of quotes are removed, nothing is expanded."""
    problems: list[Problem] = []
    env = {name: value for _, name, value in _from_file(file, problems)}
    if problems:
        raise ConfigError(*problems)
    return env


def render_env(env: Mapping[str, str]) -> str:
    """Lines that `parse_env` reads back, but for values of several lines: those stand as a shell reads them."""
    return "".join(f"{name}={_as_line(value)}\n" for name, value in sorted(env.items()))


def _as_line(value: str) -> str:
    if "\n" in value:  # no line can hold it literally
        return "$'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r") + "'"
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return f'"{value}"' if quoted or value.endswith("\r") else value


def _from_file(file: TextFile | None, problems: list[Problem]) -> Iterator[tuple[str, str, str]]:
    """(FILE:LINE, name, value) of each line that can be read; the others are added to `problems`."""
    text = "" if file is None else file.text.removeprefix("\ufeff")
    lines: dict[str, int] = {}  # of each name
    for number, line in enumerate(re.split(r"\r\n|\n", text), start=1):
        if file is None or not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{file.path}:{number}"
        name, equals, value = re.sub(r"^\s*(export[ \t]+)?", "", line).partition("=")
        if not equals:
            problems.append(Problem(f"{name!r} has no =", where, ("NAME=VALUE",)))
        elif NAME.fullmatch(name.rstrip()) and name != name.rstrip():
            problems.append(Problem(f"no blanks before the = of {name.rstrip()}", where, ("NAME=VALUE",)))
        elif not NAME.fullmatch(name):
            problems.append(Problem(f"{name!r} is no name of a variable", where, ("NAME=VALUE",)))
        elif "\0" in value:
            problems.append(Problem("a value cannot hold a NUL character", where, ("NAME=VALUE",)))
        elif lines.setdefault(name, number) != number:
            problems.append(Problem(f"{name} stands in line {lines[name]} already", where, ("remove one of them",)))
        else:
            quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
            yield where, name, value[1:-1] if quoted else value


def _forwarded(patterns: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of this shell that match a pattern, but for those that every rank gets from the launcher."""
    return {
        name: value
        for name, value in environ.items()
        if _may_travel(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def _may_travel(name: str) -> bool:
    # bash keeps functions in variables whose names no other program takes
    return name not in OWNED and not name.startswith(_OURS) and NAME.fullmatch(name) is not None


def _unfit(name: str, value: str, where: str) -> Iterator[Problem]:
    if name in OWNED:
        yield Problem(f"{name} is set for each rank by the launcher", where, (OWNED[name],))
    elif name.startswith(_OURS):
        yield Problem(f"{name}: names that begin with {_OURS} are the launcher's own", where, ("another name",))
    if "\0" in value:
        yield Problem(f"{name}: a value cannot hold a NUL character", where, (f"env.set.{name}=VALUE",))
    yield from _undecodable(name, value, f"env.set.{name}=VALUE", where)


def _undecodable(name: str, value: str, attempt: str, where: str = "this shell") -> Iterator[Problem]:
    """Bytes that are no text would not survive the plan's JSON."""
    try:
        value.encode()
    except UnicodeEncodeError:
        yield Problem(f"the value of {name} is not UTF-8, and cannot be passed on", where, (attempt,))


def _warnings(config: RunConfig, environ: Mapping[str, str], forwarded: Mapping[str, str]) -> Iterator[str]:
    """Names that were asked for and are not here; numbers of another job that are."""
    asked = [name for name in config.env.forward if name not in FORWARDED and not re.search(r"[*?\[]", name)]
    for name in asked:
        if name in environ and name not in forwarded:
            yield f"env.forward names {name}, which each rank gets from the launcher: this shell's is not passed on"
        elif name not in environ:
            yield f"env.forward names {name}, which is not set here"
    left = [name for name in OWNED if name in environ and name != "CUDA_VISIBLE_DEVICES"]
    if left and config.cluster.transport != "env":
        yield f"this shell's {', '.join(left)} {'is' if len(left) == 1 else 'are'} not used: each rank gets its own"


def _own(facts: Facts, placement: Placement, declared: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Variable -> (its value, why)."""
    env = {
        "PYTHONUNBUFFERED": ("1", "what a rank prints is in its log at once"),
        "TOKENIZERS_PARALLELISM": ("false", "a tokenizer's threads would take the ranks' cores"),
    }
    if placement.device == "cpu":
        env["DS_ACCELERATOR"] = ("cpu", "the run uses the CPU")
    else:
        env["CUDA_DEVICE_ORDER"] = ("PCI_BUS_ID", "slots are numbered as nvidia-smi does; CUDA counts the fastest as 0")
        if not any(name in declared for name in ALLOCATOR):
            reason = "freed memory of one size serves the next one: micro-batches of many lengths leave few gaps"
            env[ALLOCATOR[0]] = (EXPANDABLE, reason)
    if placement.transport == "local":  # of other hosts the cores are not known yet
        threads = max(1, facts.cpu_count // placement.world_size)
        env["OMP_NUM_THREADS"] = (str(threads), "ranks that each start a thread a core slow one another down")
    return env


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
