"""`resume RUN`: the words that started a run, read back from its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import ConfigError, Problem
from launcher.planning.grammar import as_typed
from launcher.planning.secrets import MASK
from launcher.rundir import SWEEP, RunDir

_PLACE = ("run.dir", "run.name", "run.root", "resume")  # the run goes on in its own folder, wherever that is now


def resumed_words(words: Sequence[str]) -> list[str]:
    """What was typed for the run that `words` name first, changed by the words after it.

    Raises ConfigError when there is no such run, or when a secret must be given again.
    """
    if not words or "=" in words[0] or words[0].startswith("-"):
        raise ConfigError(Problem("resume which run?", tries=("python -m launcher resume FOLDER",)))
    place, changes = Path(os.path.abspath(os.path.expanduser(words[0]))), list(words[1:])
    if (place / SWEEP).is_file():
        text = f"{words[0]} is a sweep; each of its jobs is a run that can go on"
        raise ConfigError(Problem(text, str(place), (f"python -m launcher resume {words[0].rstrip(os.sep)}/0",)))
    run = next((folder for folder in (place, *place.parents[:2]) if RunDir(folder).overrides.is_file()), None)
    if run is None:
        text = f"resume {words[0]}: no run folder or checkpoint of one"
        raise ConfigError(Problem(text, str(place), ("python -m launcher status",)))
    recorded = RunDir(run).overrides.read_text(encoding="utf-8").splitlines()
    changed = {_name(word) for word in changes}
    kept = [word for word in recorded if word and _name(word) not in (changed | set(_PLACE))]
    masked = [word for word in kept if word.endswith(f'="{MASK}"')]
    if masked:
        again = " ".join(f"{_name(word)}=VALUE" for word in masked)
        text = f"{words[0]}: secrets are not recorded: {', '.join(_name(word) for word in masked)}"
        raise ConfigError(Problem(text, tries=(f"python -m launcher resume {words[0]} {again}",)))
    # A checkpoint names itself as the place to go on from; its run stays the folder to write to.
    return [*kept, *changes, f"resume={as_typed(str(place))}"]


def _name(word: str) -> str:
    return word.partition("=")[0].lstrip("+")
