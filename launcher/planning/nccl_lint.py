"""Variables that reach NCCL, from wherever they were set, held against what is known of them."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import Problem
from launcher.planning import grammar
from launcher.planning.fabric import Fabric
from launcher.planning.nccl_names import NCCL_NAMES, TORCH_NAMES
from launcher.planning.nccl_rules import ERROR, NOTICE, WARNING, Scene
from launcher.planning.nccl_table import RULES, VERSIONS, rules_for

NAMED_HOSTS = 4
DEEPSPEED_ENV = ".deepspeed_env"
# Variables of plugins, of images and of builds: no part of the library, and yet read by somebody.
OTHERS = re.compile(
    r"NCCL_(FASTRAK_|GIB_|GPUDIRECTTCPX|SHIMNET|FASTSOCKET_|SHARP_|TUNER_CONFIG|TESTS?_|NVTX|RCCL)\w*"
    r"|NCCL_(VERSION|HOME|ROOT(_DIR)?|INCLUDE_DIRS?|LIB(_DIR|RAR\w+)?|PREFIX|PATH|DIR)"
)
KEEPS = "nccl.force=true   (it is kept, with a warning)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One thing about how GPUs talk that a person should know; an error keeps the run from starting."""

    level: str  # error | warning | notice
    text: str
    where: str = ""
    tries: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # those it is about; () = the configuration
    machine: bool = False  # whether machines must be mended, rather than the configuration

    def problem(self) -> Problem:
        """It as a problem, hosts first."""
        return Problem(f"{named(self.hosts)}{self.text}", self.where, self.tries)

    def sentence(self) -> str:
        """It as one line of the warnings."""
        where = f" ({self.where})" if self.where else ""
        return f"{named(self.hosts)}{self.text}{where}" + (f"; try {self.tries[0]}" if self.tries else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """One variable that somebody set."""

    name: str
    value: str
    where: str  # this shell | env.set | FILE | FILE of HOSTS | a key of `nccl`
    undo: str  # what takes it away


def named(hosts: Sequence[str]) -> str:
    """'a, b: ', the first hosts when they are many, '' for none."""
    more = f" and {len(hosts) - NAMED_HOSTS} more" if len(hosts) > NAMED_HOSTS else ""
    return f"{', '.join(hosts[:NAMED_HOSTS])}{more}: " if hosts else ""


def given_by_user(env: Mapping[str, str], sources: Mapping[str, str], file: str | None) -> list[Given]:
    """What this shell, env.file and env.set give to every rank; `sources` as `environ.Declared` has them."""
    found = []
    for name, value in sorted(env.items()):
        source = sources.get(name)
        if source == "forwarded":
            found.append(Given(name=name, value=value, where="this shell", undo=f"unset {name}"))
        elif source == "env.file":
            found.append(Given(name=name, value=value, where=file or source, undo=f"remove {name} from {file}"))
        elif source == "env.set":
            found.append(Given(name=name, value=value, where=source, undo=f"remove env.set.{name}"))
    return found


def given_on_hosts(fabrics: Mapping[str, Fabric], env: Mapping[str, str], transport: str) -> list[Given]:
    """What files on the hosts say, as far as no variable of the environment stands before it."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for host, fabric in fabrics.items():
        for file in fabric.files or ():
            for name, value in file.variables.items():
                if name not in env and (transport == "pdsh" or not file.path.endswith(DEEPSPEED_ENV)):
                    seen.setdefault((name, value, file.path), []).append(host)
    return [
        Given(
            name=name,
            value=value,
            where=f"{path} of {named(hosts).removesuffix(': ')}",
            undo=f"remove {name} from {path}",
        )
        for (name, value, path), hosts in seen.items()
    ]


def lint(given: Iterable[Given], scene: Scene, unknown: Mapping[str, str] | None = None) -> list[Found]:
    """Findings about variables, of each the gravest; `unknown`: name -> the library that lacks it, None = not asked."""
    found = []
    for one in given:
        if not one.value:
            continue  # as good as not set
        rule = next(rules_for(one.name, one.value, scene), None)
        if rule is not None:
            tries = _tries(one, rule.instead)
            tries = (*tries, KEEPS) if rule.level == ERROR else tries
            found.append(
                Found(level=rule.level, text=f"{one.name}={one.value} {rule.text}", where=one.where, tries=tries)
            )
        else:
            found += _ignored(one, unknown)
    return found


def forced(found: Iterable[Found]) -> list[Found]:
    """The same with errors as warnings: nccl.force=true keeps every value."""

    def kept(one: Found) -> Found:
        return dataclasses.replace(one, level=WARNING, tries=tuple(line for line in one.tries if line != KEEPS))

    return [kept(one) if one.level == ERROR else one for one in found]


def deepspeed_files(fabrics: Mapping[str, Fabric], transport: str) -> Iterator[Found]:
    """Files that only DeepSpeed's own runner reads, which starts nothing but over pdsh."""
    paths: dict[str, list[str]] = {}
    for host, fabric in fabrics.items() if transport != "pdsh" else ():
        for file in fabric.files or ():
            if file.path.endswith(DEEPSPEED_ENV) and file.variables:
                paths.setdefault(file.path, []).append(host)
    for path, hosts in paths.items():
        text = f"{path} has no effect: DeepSpeed's own runner reads it, and the ranks are not started by it"
        yield Found(level=NOTICE, text=text, tries=(f"env.file={path}",), hosts=tuple(hosts))


def versions(fabrics: Mapping[str, Fabric]) -> Iterator[Found]:
    """Versions of NCCL that are known to be bad, and hosts that differ."""
    by: dict[str, list[str]] = {}
    for host, fabric in fabrics.items():
        if fabric.nccl_version:
            by.setdefault(fabric.nccl_version, []).append(host)
    for text, hosts in by.items():
        number = fabrics[hosts[0]].version or ()
        for first, end, why in VERSIONS:
            if first <= number < end:
                yield Found(level=NOTICE, text=f"NCCL {text} {why}", hosts=tuple(hosts), machine=True)
    if len(by) > 1:
        listed = "; ".join(f"{text} on {named(hosts).removesuffix(': ')}" for text, hosts in by.items())
        yield Found(level=ERROR, text=f"NCCL differs: {listed}", tries=("the same packages on each",), machine=True)


def _tries(one: Given, instead: str | None) -> tuple[str, ...]:
    if instead is None or one.where.startswith("nccl."):
        return (one.undo,)
    written = instead.format(name=one.name, value=one.value)
    name, equals, value = written.partition("=")
    renamed = bool(equals and re.fullmatch(r"[A-Z][A-Z0-9_]+", name))
    typed = grammar.shell(f"env.set.{name}={_as_text(value)}" if renamed else f"env.set.{one.name}={_as_text(written)}")
    return (typed, one.undo) if renamed or one.where != "env.set" else (typed,)


def _as_text(value: str) -> str:
    return grammar.in_quotes(value) if grammar.top_level_commas(value) else value


def _near(name: str, known: Sequence[str]) -> list[str]:
    """The known name that a slip of the keyboard makes this one of, if there is one."""
    start, _, rest = name.partition("NCCL_")
    rests = {other.removeprefix(f"{start}NCCL_"): other for other in known}
    found = difflib.get_close_matches(rest or name, rests, n=1, cutoff=0.85 if len(rest) > 8 else 0.75)
    return [rests[one] for one in found]


def _ignored(one: Given, unknown: Mapping[str, str] | None) -> Iterator[Found]:
    """A name that nobody reads; before hosts are asked only one that is near a known one."""
    pattern, known = r"NCCL_[A-Z0-9_]+", NCCL_NAMES
    if one.name.startswith(("TORCH_NCCL_", "TORCH_FR_")):
        pattern, known = r"TORCH_(NCCL|FR)_[A-Z0-9_]+", TORCH_NAMES
    if not re.fullmatch(pattern, one.name) or OTHERS.fullmatch(one.name):
        return
    lacking = unknown.get(one.name) if unknown is not None else "NCCL" if one.name not in known else None
    near = _near(one.name, known)
    if lacking is None or (unknown is None and not near) or any(re.fullmatch(r.name, one.name) for r in RULES):
        return
    text = f"{one.name}={one.value} is ignored by {lacking}" + (f"; did you mean {near[0]}?" if near else "")
    tries = (*(_tries(one, f"{near[0]}={{value}}")[:1] if near else ()), one.undo)
    yield Found(level=WARNING if near else NOTICE, text=text, where=one.where, tries=tries)
