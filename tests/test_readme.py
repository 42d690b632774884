"""The README's commands do what it says.

A comment before a fenced block says how it is tested: `<!-- run -->` runs each line as it stands,
`<!-- plan -->` plans it (the run itself takes weights or hours), `<!-- refused -->` is a command with the
whole message that refuses it, `<!-- file: NAME -->` is a file that the commands read, `<!-- plan text -->` and
`<!-- fit table -->` are what `tests/tools/readme_plans.py` makes. `make` targets and paths named anywhere must exist.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.planning.config import read_config
from tests.tools.readme_plans import TUNES, cell, written

REPO = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")
README = (REPO / "README.md").read_text(encoding="utf-8")
CHINESE = (REPO / "README.zh-CN.md").read_text(encoding="utf-8")
# A plan asks for the disk space of its checkpoints: more than a machine that runs tests may have.
NO_CHECKPOINTS = (
    " checkpoint.every_steps=null checkpoint.at_end=false checkpoint.keep_best=false checkpoint.export=false"
)
ON_GPUS = " cluster.gpu=h200"  # such runs are no CPU's
BLOCK = re.compile(r"<!-- (?P<mark>[^>]+) -->\n```\w*\n(?P<body>.*?)```", re.DOTALL)


def blocks(mark: str) -> list[str]:
    """Bodies of the blocks whose comment starts with `mark`."""
    return [found["body"] for found in BLOCK.finditer(README) if found["mark"].split(":")[0] == mark]


def commands(mark: str) -> list[str]:
    """Lines of the blocks marked `mark`."""
    return [line for body in blocks(mark) for line in body.splitlines() if line.strip()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the README's example files and the image that they name."""
    from PIL import Image

    for found in BLOCK.finditer(README):
        kind, _, name = found["mark"].partition(": ")
        if kind == "file":
            (tmp_path / name).write_text(found["body"], encoding="utf-8")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "bike.png")
    return tmp_path


def run(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one `python ...` line of the README."""
    program, *arguments = shlex.split(line, comments=True)
    assert program == "python"
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_the_readme_has_commands_to_test() -> None:
    assert len(commands("run")) >= 4
    assert len(commands("plan")) >= 3
    assert len(blocks("file")) >= 2


@pytest.mark.parametrize("line", commands("run"))
def test_a_quick_command_succeeds(line: str, folder: Path) -> None:
    done = run(line, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", commands("plan"))
def test_a_run_plans(line: str, folder: Path) -> None:
    done = run(line.replace("-m launcher", "-m launcher plan", 1) + NO_CHECKPOINTS + ON_GPUS, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("body", blocks("refused"))
def test_a_wrong_command_is_refused_in_these_words(body: str, folder: Path) -> None:
    line, message = body.split("\n", 1)
    done = run(line.removeprefix("$ "), folder)
    assert done.returncode == 2
    assert done.stderr == message


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", (REPO / page).read_text(encoding="utf-8"), re.MULTILINE))
    assert targets
    rules = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert targets <= rules


@pytest.mark.parametrize("page", PAGES)
def test_files_named_exist(page: str) -> None:
    named = set(
        re.findall(
            r"`((?:launcher|conf|ds_configs|hostfiles|tests)/[\w./-]*)`", (REPO / page).read_text(encoding="utf-8")
        )
    )
    assert named
    assert [name for name in sorted(named) if not (REPO / name).exists() and "NAME" not in name] == []


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_plans_shown_are_those_of_now(page: str) -> None:
    """Else: python -m tests.tools.readme_plans --write"""
    text = (REPO / page).read_text(encoding="utf-8")
    assert written(text) == text


def test_an_a100_with_80_gb_fits_what_its_column_says() -> None:
    shown = README.split("<!-- fit table -->")[1]
    for tune in TUNES:
        row = next(line for line in shown.splitlines() if line.startswith(f"| `qwen3_vl_8b` | `{tune}` |"))
        assert row.split(" | ")[3] == cell("qwen3_vl_8b", tune, "a100_80g")


def test_every_group_is_in_the_table() -> None:
    groups = {entry.name for entry in (REPO / "conf").iterdir() if entry.is_dir()}
    assert groups - set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == set()


def test_the_chinese_page_has_the_same_commands_files_rows_and_headings() -> None:
    """So that what is held of one page is held of both, and nothing runs twice."""
    assert BLOCK.findall(CHINESE) == BLOCK.findall(README)
    for same in (r"^#+ ", r"^[|] ?", r"^- ", r"^python -m launcher [^#\n]*[^# \n]", r"^```\w*"):
        assert re.findall(same, CHINESE, re.MULTILINE) == re.findall(same, README, re.MULTILINE)
    english, chinese = (set(re.findall(r"`[^`\n]+`|https?://[^\s>)`]+|RESULTS.md", page)) for page in (README, CHINESE))
    assert english ^ chinese == set()
    assert "](README.zh-CN.md)" in README and "](README.md)" in CHINESE


def foreign_flags(column: int) -> list[tuple[list[str], str]]:
    """Words of one column of the table of other tools (`a: b` of YAML as a=b), each cell with the one that has ours."""
    table = README.split("| `swift sft` |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    found = []
    for line in table:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for typed in re.findall(r"`([^`]+)`", cells[column]):
            words = re.sub(r"^[a-z][\w-]+ (?:export )?(?=--)", "", typed).replace(": ", "=").split()
            if words[0] != "llamafactory-cli":
                found.append(
                    (words if "--" in typed or "=" in words[0] else [f"--{word}=1" for word in words], cells[-1])
                )
    return found


@pytest.mark.parametrize("column", [0, 1])
def test_a_flag_of_another_tool_is_answered_with_the_key_of_the_table(column: int) -> None:
    flags = foreign_flags(column)
    assert len(flags) > 10
    with pytest.raises(ConfigError) as caught:
        read_config([word for words, _ in flags for word in words])
    for words, ours in flags:
        said = "|".join(map(re.escape, words))
        answers = [problem for problem in caught.value.problems if re.match(rf"({said})[ :]", problem.text)]
        assert answers, words
        tries = " ".join(line for problem in answers for line in problem.tries)
        assert {word.partition("=")[0].strip("'") for word in tries.split()} <= set(re.findall(r"[\w.]+", ours)), words
