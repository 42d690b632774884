"""Where a value of a YAML file stands, and its text as it was written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.planning import keys, yamlfile
from launcher.resources import conf_dir

_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Source:
    """One scalar of a file: YAML turns `no` into false and 010 into 8, its `text` is what was written."""

    file: Path
    line: int
    text: str
    plain: bool  # written without quotes

    @property
    def where(self) -> str:
        """The place, for a problem: short for shipped files and for those below the current folder."""
        if self.file.is_relative_to(conf_dir()):
            return f"conf/{self.file.relative_to(conf_dir())}:{self.line}"
        below = self.file.is_relative_to(Path.cwd())
        return f"{self.file.relative_to(Path.cwd()) if below else self.file}:{self.line}"


def find_sources(folders: Sequence[Path], choices: Mapping[str, str | None]) -> dict[str, Source]:
    """Full key -> where its value was written, over config.yaml and the chosen options; later files win."""
    files = [("", folders[0] / "config.yaml")]
    for group in keys.groups():
        option = choices.get(group)
        file = keys.option_file(folders, group, option) if option else None
        if file is not None:
            files.append((group, file))
    found: dict[str, Source] = {}
    for group, file in files:
        found.update(_scan(file, group))
    return found


def _scan(file: Path, group: str) -> dict[str, Source]:
    """Sources of one file; `group` is the package that Hydra puts its keys in, unless the file says otherwise."""
    text = file.read_text(encoding="utf-8")
    header = _PACKAGE.search(text.partition("\n\n")[0])
    package = header.group(1) if header else group
    prefix = () if package == "_global_" else (package,)
    return {
        ".".join((*prefix, *path)): Source(file, line, written, plain)
        for path, (line, written, plain) in yamlfile.leaves(text).items()
    }
