"""The environment of every rank: who says what, what is kept back, and that no secret is shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.planning.command import command_script
from launcher.planning.config import read_config
from launcher.planning.describe import describe
from launcher.planning.environ import OWNED, parse_env, render_env
from launcher.planning.facts import TextFile
from launcher.spec import FORWARDED
from tests.planning_support import gpus, hostfile, plan

CASES = Path(__file__).parent / "cases" / "env_files"
TWO = {"hostfile": hostfile("example")}


def test_environment_of_ranks() -> None:
    env = plan("gpus=2", cpu_count=9).env
    assert env == {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",  # K13
    }
    # G10: deterministic kernels are asked of torch; a variable that makes launches wait would hang many nodes.
    assert plan("train.deterministic=true", "gpus=2", cpu_count=9).env == env
    assert "DS_ACCELERATOR" not in plan(gpus=gpus(2)).env
    assert "OMP_NUM_THREADS" not in plan(hostfile=hostfile("example")).env, "the cores of other machines are not known"
    file = TextFile(path="e", text="A=file\nB=file\nOMP_NUM_THREADS=3\n")
    env = plan("env.set.A=typed", env_file=file).env
    assert (env["A"], env["B"], env["OMP_NUM_THREADS"]) == ("typed", "file", "3")


@pytest.mark.parametrize("case", json.loads((CASES / "expected.json").read_text()), ids=lambda case: case["file"])
def test_env_files(case: dict[str, Any]) -> None:
    file = TextFile(path=case["file"], text=(CASES / case["file"]).read_bytes().decode())
    if isinstance(case["want"], dict):
        assert parse_env(file) == case["want"]
        return
    with pytest.raises(ConfigError) as caught:
        parse_env(file)
    assert caught.value.problems[0].where == "no_equals.env:1"
    assert "has no =" in caught.value.problems[0].text


def test_env_lines() -> None:
    text = "\n# note\n  export A='a b'\nB=\"x\nC=$HOME `id` # kept\nD=''\nE= spaced \n"
    want = {"A": "a b", "B": '"x', "C": "$HOME `id` # kept", "D": "", "E": " spaced "}
    assert parse_env(TextFile(path="e", text=text)) == want
    with pytest.raises(ConfigError) as caught:
        parse_env(TextFile(path="e", text="1A=x\nB=1\n=x\nC=\0\nexport B=2\n"))
    assert [p.where for p in caught.value.problems] == ["e:1", "e:3", "e:4", "e:5"]
    assert caught.value.problems[-1].text == "B stands in line 2 already"


NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True)
VALUES = st.text(st.characters(exclude_characters="\0\n", exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(NAMES, VALUES))
def test_written_variables_read_back_the_same(env: dict[str, str]) -> None:
    assert parse_env(TextFile(path="e", text=render_env(env))) == env
    assert parse_env(TextFile(path="e", text="\ufeff# note\n\n" + render_env(env))) == env


def test_a_value_of_several_lines_is_one_line_that_a_shell_reads() -> None:
    value = "a\n'b'\\n\r\n"
    line = render_env({"X": value})
    assert line.count("\n") == 1
    shell = ["bash", "-c", f'{line}printf %s "$X"']
    assert subprocess.run(shell, capture_output=True, check=True).stdout.decode() == value


# This shell's variables.

SHELL = {
    "HF_HOME": "/data/hf",
    "WANDB_API_KEY": "w0",
    "NCCL_DEBUG": " a\n\t$HOME 'x' \"y\" \\ é ",
    "LD_LIBRARY_PATH": "/opt/lib:/usr/lib",
    "PYTHONPATH": "/src",
    "HOME": "/home/me",
    "PATH": "/bin",
    "hf_home": "small",
}
LEFT = dict.fromkeys(OWNED, "3")


@pytest.mark.parametrize("facts", [{}, {"gpus": gpus(2)}, TWO, {"hostfile": TextFile(path="h", text="a slots=1\n")}])
def test_declared_variables_arrive_unchanged_on_one_host_and_on_many(facts: dict[str, Any]) -> None:
    env = plan(environ={**SHELL, **LEFT, "LAUNCHER_RUN": "x", "BASH_FUNC_f%%": "() { :; }"}, **facts).env
    forwarded = {name: value for name, value in env.items() if name in {*SHELL, *LEFT}}
    names = ("HF_HOME", "WANDB_API_KEY", "NCCL_DEBUG", "LD_LIBRARY_PATH", "PYTHONPATH")
    assert forwarded == {name: SHELL[name] for name in names}
    assert not any(name.startswith(("LAUNCHER", "BASH")) for name in env)


def test_who_wins() -> None:
    file = TextFile(path="e", text="HF_HOME=file\nNCCL_DEBUG=file\n")
    shell = {**SHELL, "OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": "0"}
    made = plan("env.set.HF_HOME=typed", environ=shell, env_file=file)
    assert (made.env["HF_HOME"], made.env["NCCL_DEBUG"], made.env["LD_LIBRARY_PATH"]) == (
        "typed",
        "file",
        SHELL["LD_LIBRARY_PATH"],
    )
    assert (made.env["OMP_NUM_THREADS"], made.env["PYTHONUNBUFFERED"]) == ("7", "0")
    assert made.env.keys() == made.env_sources.keys()
    sources = {name: made.env_sources[name] for name in ("HF_HOME", "NCCL_DEBUG", "PYTHONPATH", "DS_ACCELERATOR")}
    assert list(sources.values()) == ["env.set", "env.file", "forwarded", "launcher"]
    text = describe(made)
    for line in ("env.set    HF_HOME=typed", "env.file   NCCL_DEBUG=file", "forwarded  OMP_NUM_THREADS=7"):
        assert f"  {line}\n" in text


def test_patterns_are_exact_and_absent_names_are_told() -> None:
    """T01."""
    made = plan("env.forward=[MY_*,Other,NOT_HERE,NO*PE,RANK]", environ={"MY_A": "1", "my_a": "2", "Other": "", **LEFT})
    assert {name: made.env[name] for name, source in made.env_sources.items() if source == "forwarded"} == {
        "MY_A": "1",
        "Other": "",
    }
    said = [text for text in made.warnings if "env.forward" in text]
    assert said == [
        "env.forward names NOT_HERE, which is not set here",
        "env.forward names RANK, which each rank gets from the launcher: this shell's is not passed on",
    ]
    assert plan("env.forward=[]", environ=SHELL).env == plan().env
    assert plan(environ={}).warnings == (), "the usual names need not be set"


def test_numbers_of_another_job_are_told_and_not_used() -> None:
    made = plan(environ={"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"})
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & made.env.keys()
    assert "this shell's WORLD_SIZE, RANK, LOCAL_RANK are not used: each rank gets its own" in made.warnings


@pytest.mark.parametrize(
    ("words", "facts", "text"),
    [
        ((), {"environ": {"NCCL_X": "a\udcff"}}, "the value of NCCL_X is not UTF-8"),
        (("env.set.X=a\udcff",), {}, "the value of X is not UTF-8"),
        (("env.set.LAUNCHER_X=1",), {}, "names that begin with LAUNCHER_ are the launcher's own"),
        (
            (),
            {"env_file": TextFile(path="e", text="A=1\nRANK=1\n")},
            "is set for each rank by the launcher    (e:2)",
        ),
        ((), {"env_file": TextFile(path="e", text="A = 1\n")}, "no blanks before the = of A    (e:1)"),
    ],
)
def test_variables_that_are_refused(words: tuple[str, ...], facts: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*words, **facts)
    assert text in caught.value.render()
    assert all(problem.tries for problem in caught.value.problems)


def test_bytes_that_are_not_passed_on_do_no_harm() -> None:
    assert plan(environ={"LS_COLORS": "a\udcff"}).env == plan().env


def test_the_list_in_conf_is_the_one_of_the_schema() -> None:
    assert tuple(read_config([]).config.env.forward) == FORWARDED


# Secrets.

SECRETS = {"HF_TOKEN": "hf_SEKRET", "WANDB_API_KEY": "SEKRET", "https_proxy": "http://me:SEKRET@proxy:3128"}


def test_no_secret_is_shown_or_written() -> None:
    file = TextFile(path="e", text="AWS_SECRET_ACCESS_KEY=SEKRET\n")
    words = ("env.set.X_TOKEN=SEKRET", "env.set={Y_PASSWORD:SEKRET}")
    for word in words:
        made = plan(word, environ=SECRETS, env_file=file, **TWO)
        composed = read_config([word])
        assert sum("SEKRET" in value for value in made.env.values()) == 5
        for shown in (describe(made), command_script(made), composed.yaml, " ".join(composed.overrides)):
            assert "SEKRET" not in shown
    assert "HF_TOKEN='***'" in describe(made)


def test_no_secret_in_json(tmp_path: Path) -> None:
    environ = {**os.environ, **SECRETS, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "launcher", "plan", "--json", "env.set.X_TOKEN=SEKRET"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert "SEKRET" not in done.stdout + done.stderr
    assert json.loads(done.stdout)["env"]["HF_TOKEN"] == "***"
