"""The words of a sweep -> its jobs, in Hydra's grammar and order; what is wrong with them, said once for all jobs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import ConfigError, LauncherError, Problem
from launcher.plain import to_data
from launcher.planning import grammar, keys, secrets
from launcher.planning.config import Composed, read_config
from launcher.planning.gpus import GIB
from launcher.planning.lines import table
from launcher.planning.overrides import SLOT_LISTS, SWEEP_FLAGS, take_config_dirs
from launcher.spec import RunOptions, RunPlan, SweepOptions

MAX_JOBS = 1000
MAX_COUNTED = 100_000  # values of one key
WHOLE = ("run.", "sweep.")  # keys that are about the whole sweep, not about one of its jobs

Options = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a sweep."""

    number: int
    words: tuple[str, ...]  # what would be typed for it alone
    differs: tuple[tuple[str, str], ...]  # each swept group or key and its value here, secrets masked

    @property
    def title(self) -> str:
        """What makes it differ from the other jobs."""
        return " ".join(f"{key}={value}" for key, value in self.differs)

    @property
    def own_words(self) -> tuple[str, ...]:
        """Its words without those about the whole sweep."""
        return tuple(word for word in self.words if not name_of(word).startswith(WHOLE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Jobs:
    """A sweep that was read: each job has either a configuration or what is wrong with it."""

    jobs: tuple[Job, ...]
    composed: dict[int, Composed]  # by number
    invalid: dict[int, LauncherError]
    place: RunOptions
    options: SweepOptions

    @property
    def swept(self) -> tuple[str, ...]:
        """The groups and keys that differ."""
        return tuple(key for key, _ in self.jobs[0].differs)

    @property
    def metric(self) -> str:
        """What sorts the table; "loss" alone is the one trained on."""
        first = next(iter(self.composed.values()), None)
        own = first.config.metric if first else ""
        return self.options.metric or ("eval/loss" if own == "loss" else own)


def name_of(word: str) -> str:
    """The group or key that a word sets."""
    return word.partition("=")[0].strip().lstrip("+")


def read_jobs(words: Sequence[str], tell: Callable[[int, int], None] = lambda done, all_: None) -> Jobs:
    """Every job of a sweep with its own configuration; `tell` hears how many of them are read.

    Raises ConfigError when the sweep itself cannot be; what is wrong with single jobs is in the result.
    """
    jobs = expand(words)
    composed: dict[int, Composed] = {}
    invalid: dict[int, LauncherError] = {}
    for job in jobs:
        try:
            composed[job.number] = read_config(job.words, sweep=True)
        except ConfigError as error:
            invalid[job.number] = error
        tell(job.number + 1, len(jobs))
    invalid.update(_repeated(jobs, composed))
    place, options = _whole(composed)
    kept = {number: one for number, one in composed.items() if number not in invalid}
    return Jobs(jobs=jobs, composed=kept, invalid=invalid, place=place, options=options)


def expand(words: Sequence[str]) -> tuple[Job, ...]:
    """The product of all values, the last word's changing fastest, as Hydra's own sweeper has it.

    Raises ConfigError when a sweep cannot be read; a word that is wrong as it stands goes to every job.
    """
    typed = [word for word in words if word not in SWEEP_FLAGS]
    options = keys.options(take_config_dirs(typed)[1])
    problems = [*_given_twice(typed, options)]
    axes: list[tuple[str, ...]] = []
    swept: list[str] = []
    for word in typed:
        values = _values(word, options)
        if isinstance(values, Problem):
            problems.append(values)
            continue
        name = name_of(word)
        axes.append((word,) if values is None else tuple(f"{name}={value}" for value in values))
        swept += [] if values is None else [name]
    count = math.prod(len(axis) for axis in axes)
    if count > MAX_JOBS and not problems:
        more = "at least " if any(len(axis) == MAX_COUNTED for axis in axes) else ""
        each = " x ".join(f"{name_of(axis[0])} has {len(axis):,}" for axis in axes if len(axis) > 1)
        text = f"{more}{count:,} jobs ({each}); a sweep has at most {MAX_JOBS:,}"
        problems.append(Problem(text, tries=("fewer values of a key",)))
    if problems:
        raise ConfigError(*problems, title="with this sweep")
    return tuple(_job(number, chosen, swept) for number, chosen in enumerate(itertools.product(*axes)))


def _job(number: int, words: tuple[str, ...], swept: Sequence[str]) -> Job:
    differs = tuple((name_of(word), shown_value(word)) for word in words if name_of(word) in swept)
    return Job(number=number, words=words, differs=differs)


def shown_value(word: str) -> str:
    """The value in KEY=VALUE as it may be shown."""
    key, value = name_of(word), word.partition("=")[2]
    hidden = key.startswith("env.set.") and secrets.is_secret(key, value)
    inside = key == "env.set" and secrets.is_secret(value, value)
    return secrets.MASK if hidden or inside else value


def _given_twice(words: Sequence[str], options: Options) -> list[Problem]:
    problems = []
    for name in dict.fromkeys(map(name_of, words)):
        same = [word for word in words if name_of(word) == name and "=" in word]
        if len(same) > 1 and any(_values(word, options) is not None for word in same):
            text = f"{name} is given {len(same)} times: {', '.join(same)}"
            problems.append(Problem(text, tries=(f"-m {grammar.shell(same[-1])}",)))
    return problems


def _values(word: str, options: Options) -> tuple[str, ...] | Problem | None:
    """What KEY=VALUES goes over, each value as it is typed; None when it is one value, or no KEY=VALUE of ours."""
    key, equals, raw = name_of(word), word.partition("=")[1], word.partition("=")[2].strip()
    known = key in options or (keys.kind_of(key) is not None and not keys.names_option(key))
    if not equals or word.startswith("-") or not known or key in SLOT_LISTS:
        return None
    if key == "resume" and raw != "null":
        return Problem(f"{word}: every job of a sweep starts anew", tries=(f"python -m launcher resume {raw}",))
    override = grammar.read_override(raw)
    if override is None:
        return _unreadable(key, raw) if keys.is_text(key) and _is_list(raw) else None
    if not override.is_sweep_override() or _means_one_list(key, raw):
        return None
    if key.startswith(WHOLE):
        text = f"{key}={raw}: {key} is about the whole sweep, and has one value"
        return Problem(text, tries=(_try(key, grammar.pieces(raw)[0]),))
    return _enumerated(key, raw, override, options)


def _is_list(raw: str) -> bool:
    return len(grammar.pieces(raw)) > 1 and all(grammar.pieces(raw))


def _means_one_list(key: str, raw: str) -> bool:
    """Whether the commas separate the items of one list that lacks its brackets; refused as in a single run."""
    return str(keys.base(keys.kind_of(key))).startswith("list") and "[" not in raw and "(" not in raw


def _unreadable(key: str, raw: str) -> Problem:
    several = ",".join(grammar.in_quotes(piece) for piece in grammar.pieces(raw))
    text = f"{key}={raw}: text like this is typed in quotes, each value by itself"
    return Problem(text, tries=(_try(key, several), _try(key, grammar.in_quotes(raw))))


def _try(key: str, raw: str) -> str:
    return f"-m {grammar.shell(f'{key}={raw}')}"


def _enumerated(key: str, raw: str, override: Any, options: Options) -> tuple[str, ...] | Problem:
    from hydra.core.override_parser.types import ValueType

    if override.value_type == ValueType.INTERVAL_SWEEP:
        start, end = override.value().start, override.value().end
        text = f"{key}={raw}: a sweep goes over single values, and an interval has no end of them"
        return Problem(text, tries=(_try(key, f"{start:g},{(start + end) / 2:g},{end:g}"),))
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        if key not in options:
            return Problem(f"{key}={raw}: glob() chooses options of a group", tries=(f"-m {key}=VALUE,VALUE",))
        names = tuple(override.value().filter(list(options[key])))
        text = f"{key}={raw}: no option fits; {key} has {', '.join(options[key])}"
        return names or Problem(text, tries=(_try(key, "glob(*)"),))
    values = tuple(itertools.islice(override.sweep_string_iterator(), MAX_COUNTED))
    if not values:
        return Problem(f"{key}={raw}: there is no value in it", tries=(f"-m {key}=VALUE,VALUE",))
    return _as_typed(raw, values)


def _as_typed(raw: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """The typed form of each value where the list is typed plainly: 1e-3 rather than 0.001, and text to the letter."""
    typed = tuple(grammar.pieces(raw))
    same = len(typed) == len(values) and all(
        grammar.parse(a) == grammar.parse(b) for a, b in zip(typed, values, strict=True)
    )
    return typed if same else values


def _repeated(jobs: Sequence[Job], composed: Mapping[int, Composed]) -> dict[int, LauncherError]:
    """Jobs whose configuration an earlier job has."""
    first: dict[str, Job] = {}
    found: dict[int, LauncherError] = {}
    for job in jobs:
        if job.number in composed:
            same = first.setdefault(json.dumps(to_data(composed[job.number].config)), job)
            if same is not job:
                text = f"the same run as job {same.number} ({same.title})"
                found[job.number] = ConfigError(Problem(text, tries=("each value once",)))
    return found


def _whole(composed: Mapping[int, Composed]) -> tuple[RunOptions, SweepOptions]:
    """Where the sweep lives and how it goes, on which the jobs (their experiments) must agree."""
    if not composed:
        return RunOptions(), SweepOptions()
    problems = []
    for section in ("run", "sweep"):
        found = [getattr(one.config, section) for one in composed.values()]
        for field in dataclasses.fields(found[0]):
            values = list(dict.fromkeys(getattr(one, field.name) for one in found))
            if len(values) > 1:
                shown = " and ".join(grammar.as_typed(value) for value in values[:3])
                text = f"{section}.{field.name} is {shown} in different jobs, and is about the whole sweep"
                problems.append(Problem(text, tries=(f"-m {section}.{field.name}=VALUE",)))
    if problems:
        raise ConfigError(*problems, title="with this sweep")
    config = next(iter(composed.values())).config
    return config.run, config.sweep


def refusal(jobs: Sequence[Job], errors: Mapping[int, LauncherError]) -> ConfigError:
    """All problems of all jobs, each once with the jobs that have it."""
    return ConfigError(*grouped(jobs, errors), title=f"with this sweep of {_count(len(jobs))}")


def grouped(jobs: Sequence[Job], errors: Mapping[int, LauncherError]) -> list[Problem]:
    """Each problem once, its jobs before it unless all have it."""
    having: dict[Problem, list[Job]] = {}
    for job in jobs:
        for problem in errors[job.number].problems if job.number in errors else ():
            having.setdefault(problem, []).append(job)
    return [
        problem if len(of) == len(jobs) else dataclasses.replace(problem, text=f"{which(of)}: {problem.text}")
        for problem, of in having.items()
    ]


def describe_jobs(jobs: Sequence[Job], plans: Mapping[int, RunPlan], invalid: Mapping[int, LauncherError]) -> list[str]:
    """Every job in a table, then what is worth a warning."""
    valid = [job for job in jobs if job.number in plans]
    rows = [("job", *(key for key, _ in jobs[0].differs), "ranks", "steps", "GiB", "")]
    for job in jobs:
        cells = ("-", "-", "-", "invalid: left out")
        if job.number in plans:
            plan = plans[job.number]
            steps = plan.batch.total_steps
            size = sum(plan.memory.values()) / GIB
            cells = (f"{plan.world_size}", "?" if steps is None else f"{steps:,}", f"{size:.2f}", "")
        rows.append((str(job.number), *(value for _, value in job.differs), *cells))
    swept = len(jobs[0].differs)
    warnings = {number: ConfigError(*plan.warnings) for number, plan in plans.items()}
    return [
        f"{_count(len(valid))}, one after another; GiB is the memory of one GPU or rank, estimated",
        *table(rows, right=(0, swept + 1, swept + 2, swept + 3)),
        *(f"warning: {problem.text}" for problem in grouped(valid, warnings)),
        *(f"left out: {problem.text}" for problem in grouped(jobs, invalid)),
    ]


def which(jobs: Sequence[Job]) -> str:
    """Numbers of jobs, and what they have in common: `jobs 0, 2 (zero=stage2)`."""
    common = [pair for pair in jobs[0].differs if all(pair in job.differs for job in jobs)]
    numbers = ", ".join(str(job.number) for job in jobs[:10])
    more = f" and {len(jobs) - 10} more" if len(jobs) > 10 else ""
    shared = f" ({' '.join(f'{key}={value}' for key, value in common)})" if common else ""
    return f"job{'s' if len(jobs) > 1 else ''} {numbers}{more}{shared}"


def _count(jobs: int) -> str:
    return f"{jobs:,} job{'s' if jobs > 1 else ''}"
