"""A whole command of another tool (`swift sft --lora_rank 8 ...`), and the same as one line of ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import Problem
from launcher.planning import answers, grammar, habits

# What stands for a value that only the person knows; such words are not part of a line that can be copied.
_UNKNOWN = re.compile(r"=(NAME|VALUE|FILE|FOLDER)$")
_LISTS = ("dataset", "val_dataset", "target_modules")  # flags that take several values
_SFT = (("swift", "sft"), ("sft",))  # begin a command whose task is sft unless it says otherwise
_TASKS = ("task_type", "loss_type", "task")


@dataclass(frozen=True, slots=True)
class ForeignCommand:
    """Words that begin another tool's command, and the variables and flags that are to be answered."""

    verb: tuple[str, ...]  # ("swift", "sft"); empty: these are words of ours
    rest: list[str]

    def name(self) -> str:
        """As it was typed."""
        return " ".join(self.verb)


def is_verb(word: str) -> bool:
    """Whether `word` begins the command with which another tool trains."""
    return habits.VERBS.get(plain(word)) == "run"


def plain(word: str) -> str:
    """A word as tables of habits have it."""
    return word.lower().replace("-", "").replace("_", "")


def split(words: Sequence[str]) -> ForeignCommand:
    """Words of ours as they are; those of another tool's command without its name, variables before it kept."""
    first = next((i for i, word in enumerate(words) if not re.match(r"[A-Z][A-Z0-9_]*=", word)), len(words))
    flags = next((i for i, word in enumerate(words) if word.startswith("--")), None)
    if flags is None or flags <= first or not is_verb(words[first]):
        return ForeignCommand((), list(words))
    return ForeignCommand(tuple(words[first:flags]), [*words[:first], *words[flags:]])


def in_one_line(command: ForeignCommand, options: Mapping[str, Sequence[str]]) -> Problem | None:
    """The whole command in words of ours; None where nothing of it has a counterpart."""
    typed = list(_typed(command.rest))
    given = dict(typed)
    ours = ["task=sft"] if command.verb in _SFT and not given.keys() & {*_TASKS} else []
    for name, value in typed:
        ours += _ours(name, value, options)
    if batch := _global_size(given):
        ours.append(batch)
    line = " ".join(map(grammar.shell, _once(ours)))
    text = f"{command.name()}: a command of another tool; in words of ours, as far as each is answered below"
    return Problem(text, tries=(f"python -m launcher plan {line}",)) if line else None


def _typed(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags and variables with their values; several values are one list."""
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        flag, _, value = word.partition("=")
        values = [value] if value else []
        if word.startswith("-"):
            end = next((i for i in range(at, len(words)) if words[i].startswith("--")), len(words))
            values += words[at:end]
            at = end
        name = flag.lstrip("-").replace("-", "_")
        several = name in _LISTS and len(values) > 1
        yield name, f"[{','.join(values)}]" if several else "".join(values[:1])


def _ours(name: str, value: str, options: Mapping[str, Sequence[str]]) -> list[str]:
    """What to type for one flag or variable; nothing where that is not known."""
    if name == "dataset" and value[:1] == "[":
        return ["dataset=jsonl", f"dataset.train={value}"]
    problem = answers.for_flag(f"--{name}", name, name, value, options)
    words = shlex.split(problem.tries[0]) if problem.tries and "python -m" not in problem.tries[0] else []
    return [] if any(_UNKNOWN.search(word) for word in words) else words


def _global_size(given: Mapping[str, str]) -> str | None:
    """Rows of an optimizer step where the accumulation is typed; else both tools choose about 16."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "NPROC_PER_NODE", "NNODES")
    counts = [given.get(name, "1") for name in names]
    if "gradient_accumulation_steps" not in given or not all(map(str.isdecimal, counts)):
        return None
    size = 1
    for count in counts:
        size *= int(count)
    return f"batch.global_size={size}"


def _once(words: Sequence[str]) -> list[str]:
    """Each key once, the last value winning; 4 bits win over plain adapters, which `--tuner_type lora` means too."""
    last = {word.partition("=")[0]: word for word in words}
    if "tune=qlora" in words:
        last["tune"] = "tune=qlora"
    return list(last.values())
