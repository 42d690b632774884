"""The environment of every rank: what the launcher sets, a file of KEY=VALUE lines, single values. All literal."""

from __future__ import annotations

import re
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.facts import Facts, TextFile
from launcher.planning.placement import Placement, is_this_machine
from launcher.spec import RunConfig

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

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


def rank_environment(config: RunConfig, facts: Facts, placement: Placement) -> dict[str, str]:
    """Variables of every rank, the last word first: env.set, then env.file, then the launcher's own."""
    env = _defaults(facts, placement)
    problems: list[Problem] = []
    if facts.env_file is not None:
        try:
            env.update(parse_env(facts.env_file))
        except ConfigError as error:
            problems.extend(error.problems)
    for name, value in config.env.set.items():
        if not _NAME.fullmatch(name):
            problems.append(Problem(f"env.set.{name}: not a name of a variable", "", ("env.set.NAME=VALUE",)))
        elif value is not None:
            env[name] = _text(value)
    for name, instead in OWNED.items():
        if name in env:
            where = "env.set" if name in config.env.set else facts.env_file.path if facts.env_file else ""
            problems.append(Problem(f"{name} is set for each rank by the launcher", where, (instead,)))
    if problems:
        raise ConfigError(*problems)
    return env


def parse_env(file: TextFile) -> dict[str, str]:
    """KEY=VALUE lines: `export ` and one enclosing pair of quotes are removed, nothing is expanded."""
    env: dict[str, str] = {}
    problems: list[Problem] = []
    for number, line in enumerate(re.split(r"\r\n|\n", file.text.removeprefix("\ufeff")), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.lstrip().removeprefix("export ").lstrip().partition("=")
        if not equals or not _NAME.fullmatch(name) or "\0" in value:
            text = f"{name!r} has no =" if not equals else f"{name!r} is no name of a variable"
            text = "a value cannot hold a NUL character" if "\0" in value else text
            problems.append(Problem(text, f"{file.path}:{number}", ("NAME=VALUE",)))
            continue
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        env[name] = value[1:-1] if quoted else value
    if problems:
        raise ConfigError(*problems)
    return env


def _defaults(facts: Facts, placement: Placement) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if placement.device == "cpu":
        env["DS_ACCELERATOR"] = "cpu"
    else:
        # Slot numbers are those of nvidia-smi, which counts by bus; CUDA alone counts the fastest GPU as 0.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if all(is_this_machine(host, facts.hostname) for host in placement.hosts):
        # Ranks that each start a thread a core slow one another down.
        env["OMP_NUM_THREADS"] = str(max(1, facts.cpu_count // placement.world_size))
    return dict(sorted(env.items()))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
