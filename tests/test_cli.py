"""`python -m launcher VERB`: verbs, exit codes, streams; what is printed and what is not imported."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import __version__
from launcher.__main__ import _VERBS, main
from launcher.errors import ConfigError
from launcher.planning import keys
from launcher.planning.config import read_config
from launcher.planning.help import VERBS
from launcher.resources import conf_dir
from launcher.streams import fitted

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test stands in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", ["--help", "-h", "help", "plan --help", "model=tiny -h"])
def test_help_fits_a_page_and_names_everything(words: str, capsys: Captured) -> None:
    assert main(words.split()) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 120
    assert [group for group in keys.groups() if f"\n  {group} " not in shown.out] == []
    options = {name for names in keys.options([conf_dir()]).values() for name in names}
    assert [name for name in options if name not in shown.out] == []
    assert set(VERBS) == set(_VERBS)
    unnamed = {verb for verb in VERBS if f"  python -m launcher {verb} " not in shown.out}
    assert unnamed == {"run", "help"}  # the one is meant when none is given, the other has just been found


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"launcher {__version__}\n"


def test_config_lists_keys_with_defaults_and_comments(capsys: Captured) -> None:
    assert main(["config", "optim"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("optim=adamw   (when none is named)\n")
    for key in keys.kinds():
        if key.startswith("optim."):
            line = next(line for line in shown.splitlines() if line.startswith(f"  {key} = "))
            assert len(line.split("  ")[-1]) > 10, f"{key} has no comment"


@pytest.mark.parametrize("group", [*keys.groups(), *keys.SECTIONS, "nodes", "tune.r"])
def test_config_shows_every_group(group: str, capsys: Captured) -> None:
    assert main(["config", group]) == 0
    name = group.split(".")[0]
    assert capsys.readouterr().out.lstrip().startswith(name)


def test_config_shows_lists_that_stand_below_their_key(capsys: Captured) -> None:
    assert main(["config", "env"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in keys.default("env.forward"))


def test_config_without_a_group_is_the_table_of_contents(capsys: Captured) -> None:
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert [group for group in keys.groups() if f"- {group}:" not in shown] == []


@pytest.mark.parametrize(
    ("words", "text", "tried"),
    [
        ("trian", "there is no verb trian", "python -m launcher run ..."),
        ("train model=tiny", "there is no verb train", "python -m launcher run ..."),
        ("pln", "there is no verb pln", "python -m launcher plan ..."),
        ("dry-run", "there is no verb dry-run", "python -m launcher plan ..."),
        ("version", "there is no verb version", "python -m launcher --version"),
        ("doctor", "there is no verb doctor", "python -m launcher check hosts ..."),
        ("xyzzy", "neither a verb nor KEY=VALUE", "python -m launcher help"),
        ("zero", "which one?", "zero=stage2"),
        ("config tunee", "there is no group tunee", "python -m launcher config tune"),
        ("config lr", "there is no group lr", "python -m launcher config optim"),
        ("config tune optim", "config takes one group", "python -m launcher config tune"),
        ("config --config-dir nowhere tune", "no such folder", "--config-dir FOLDER"),
        ("check", "check what?", "python -m launcher check data ..."),
        ("resume", "resume which run?", "python -m launcher resume FOLDER"),
        ("resume nowhere", "no run folder nowhere, here or in runs", "the same command in the folder where the run"),
        ("check data -m train.seed=1,2", "-m starts a sweep", "python -m launcher -m KEY=VALUE,VALUE"),
        ("plan train.seed=1,2", "one run takes one value", "python -m launcher -m train.seed=1,2"),
        ("sweep zero=stage2,stage3", "there is no verb sweep", "python -m launcher -m ..."),
        ("plan model=tiny --jsn", "--jsn", ""),
    ],
)
def test_wrong_words_exit_2_with_something_to_try(words: str, text: str, tried: str, capsys: Captured) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert text in shown.err
    assert f"     try  {tried}" in shown.err
    assert "Traceback" not in shown.err


def plan_json(words: list[str], capsys: Captured) -> dict[str, object]:
    assert main(["plan", "--json", *words]) == 0
    data: dict[str, object] = json.loads(capsys.readouterr().out)
    return data


def test_plan_json_holds_the_contract(capsys: Captured) -> None:
    words = [
        "model=qwen3_vl_reranker_8b",
        "zero=stage3",
        "nodes=2",
        "env.set.HF_TOKEN=hf_abc",
        "env.set.NCCL_DEBUG=INFO",
    ]
    data = plan_json(words, capsys)
    wanted = "hosts world_size master_addr master_port env batch deepspeed trainable memory commands warnings"
    assert [key for key in wanted.split() if key not in data] == []
    hosts = data["hosts"]
    assert isinstance(hosts, list)
    assert [set(host) >= {"name", "address", "port", "user", "gpus"} for host in hosts] == [True, True]
    assert data["world_size"] == sum(len(host["gpus"]) for host in hosts)
    assert data["env"]["HF_TOKEN"] == "***"  # type: ignore[index]
    assert data["env"]["NCCL_DEBUG"] == "INFO"  # type: ignore[index]
    assert "hf_abc" not in json.dumps(data)
    assert "auto" not in json.dumps(data["deepspeed"])


def shipped() -> list[str]:
    """Every option of every group."""
    return [f"{group}={name}" for group, names in keys.options([conf_dir()]).items() for name in names]


@pytest.mark.parametrize("word", shipped())
def test_every_shipped_option_plans(word: str, elsewhere: Path, capsys: Captured) -> None:
    row = {"query": "q", "positives": ["a"], "negatives": ["b"]}
    (elsewhere / "t.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    needed = {"dataset=jsonl": ["dataset.train=t.jsonl"], "zero=stage0": ["precision=fp32"]}
    needed |= {"zero=stage3_nvme": ["zero.nvme_path=/local"], "zero=zeropp": ["precision=fp16", "tune=full"]}
    needed |= {one: ["dataset.train=t.jsonl"] for one in shipped() if one.startswith("experiment=")}
    needed["experiment=digits"] = []
    needed |= {"loss=custom": ["loss.function=ours:loss"], "loss=cross_entropy": ["task=sft", "dataset=jsonl"]}
    needed["loss=cross_entropy"] += needed["dataset=jsonl"]
    words = [word, *needed.get(word, []), "nodes=2"]  # without a hostfile two hosts with GPUs are assumed
    if word == "model=local":
        folder = elsewhere / "m"
        folder.mkdir()
        arch = plan_json(["model=qwen3_vl_2b"], capsys)["arch"]
        (folder / "config.json").write_text(json.dumps(arch), encoding="utf-8")
        words += ["model.path=m", "model.weights=random"]
    elif re.fullmatch(r"model=qwen(3(_reranker)?_[\d_]+b|2_5_72b)", word) and "3_5" not in word:
        words += ["dataset=jsonl", "dataset.train=t.jsonl"]  # a text model sees no digits
    elif not word.startswith(("model=", "experiment=")):
        words.append("model=qwen3_vl_2b")
    refused = word == "zero=autotp"  # its name is kept for the reason why it is refused
    assert main(["plan", *words]) == (2 if refused else 0)
    assert ("AutoTP" in capsys.readouterr().err) == refused


# Real processes.

PROBE = "import sys; from launcher.__main__ import main; main(sys.argv[1:]); print(sorted(sys.modules))"


def loaded(words: str) -> set[str]:
    """Top-level modules that a verb loads."""
    command = [sys.executable, "-c", PROBE, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    modules: list[str] = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
    return {name.split(".")[0] for name in modules} | {name for name in modules if name.startswith("launcher.")}


def test_looking_at_runs_does_not_load_hydra() -> None:
    assert loaded("status") & {"hydra", "omegaconf", "yaml", "torch"} == set()


def test_plan_loads_nothing_heavy() -> None:
    names = loaded("plan")
    heavy = {"torch", "deepspeed", "transformers", "peft", "datasets", "pyarrow", "rich", "numpy", "launcher.training"}
    assert "hydra" in names
    assert names & heavy == set()


def test_plan_works_from_another_folder_and_its_problems_are_on_standard_error(launch: Launch, elsewhere: Path) -> None:
    good = launch("plan")
    assert (good.returncode, good.stderr) == (0, "")
    assert str(elsewhere / "runs") in good.stdout
    bad = launch("plan", "zero=stge3", "optim.lrr=1", "nodes=zwei")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("3 problems with this run:\n")
    assert list(elsewhere.iterdir()) == []  # planning leaves nothing behind


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("config | head -n 1; exit ${PIPESTATUS[0]}", 0, ""),
        ("config >&- <&-", 0, ""),
        ("plan zero=stge3 2>&1 | true; exit ${PIPESTATUS[0]}", 2, ""),
        ("config >/dev/full", 3, "No space left on device"),
        ("plan run.name=ü >/dev/null", 0, ""),
        ("plan resume=$(printf 'x%.0s' {1..300})", 3, "File name too long"),
    ],
)
def test_streams_that_do_not_take_the_text(line: str, code: int, said: str) -> None:
    command = ["bash", "-c", f"PYTHONIOENCODING=ascii {sys.executable} -m launcher {line}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert (done.stderr != "") == (said != "")
    assert "Traceback" not in done.stderr


def test_what_is_fetched_is_as_large_as_it_likes(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of it here is refused for memory and disk, its weights may be for other machines."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(elsewhere))
    words = ["model=qwen3_vl_235b_a22b", "env.set.DS_ACCELERATOR=cpu"]
    assert [main([verb, *words]) for verb in ("plan", "fetch")] == [2, 3]


def test_a_user_without_a_home_folder_plans(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """As containers and services have it: no HOME, and a number that no user of the system has."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert main(["plan", "model=qwen3_vl_2b", "dataset.train=~/rows.jsonl"]) == 2
    assert "dataset.train=/rows.jsonl: no such file" in capsys.readouterr().err


def test_a_mistake_of_ours_exits_1_with_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("launcher.planning.help.help_text", lambda folders: 1 / 0)
    assert main(["help"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "internal error: ZeroDivisionError: division by zero" in shown


def test_a_whole_foreign_command_has_every_flag_answered(launch: Launch) -> None:
    done = launch("swift", "sft", "--lora_rank", "8", "--learning_rate", "5e-6")
    assert done.returncode == 2
    assert "3 problems" in done.stderr and "try  tune.r=8" in done.stderr and "try  optim.lr=5e-6" in done.stderr


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (
            "swift sft --model Qwen/Qwen3-VL-8B-Instruct --dataset a.jsonl b.jsonl --tuner_type lora --lora_rank 4 "
            "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --padding_free true",
            "task=sft model=qwen3_vl_8b dataset=jsonl 'dataset.train=[a.jsonl,b.jsonl]' tune=lora tune.r=4 "
            "batch.global_size=8",
        ),
        (
            "NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 swift sft --model Qwen/Qwen3-VL-Reranker-8B "
            "--dataset a.jsonl#2 --task_type generative_reranker --tuner_type lora --gradient_accumulation_steps 4 "
            "--quant_bits 4 --per_device_train_batch_size 2",
            "'gpus=[0,1]' model=qwen3_vl_reranker_8b dataset=jsonl dataset.train=a.jsonl dataset.max_rows=2 "
            "task=rerank tune=qlora batch.global_size=16",
        ),
        (
            "llamafactory-cli train --stage sft --model_name_or_path Qwen/Qwen3-VL-8B-Instruct",
            "task=sft model=qwen3_vl_8b",
        ),
    ],
)
def test_a_whole_foreign_command_is_one_line_of_ours(typed: str, ours: str) -> None:
    """What is offered is accepted."""
    with pytest.raises(ConfigError) as caught:
        read_config(typed.split())
    assert caught.value.problems[0].tries == (f"python -m launcher plan {ours}",)
    read_config([*shlex.split(ours), *(["dataset=digits"] if "dataset" not in ours else [])])


def test_lines_are_broken_between_words_in_a_terminal_but_those_to_type() -> None:
    """A pipe gets them whole."""
    master, slave = pty.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "w") as terminal:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
        text = "  " + "a word of many " * 6 + "\n     try  " + "key=value " * 8
        folded = fitted(text, terminal).splitlines()
    assert folded[-1] == "     try  " + "key=value " * 8
    assert [len(line) - len(line.lstrip()) for line in folded] == [2, 4, 5] and max(map(len, folded[:-1])) <= 50
    assert " ".join(folded[:-1]).split() == ("a word of many " * 6).split()
    with open(os.devnull, "w") as file:
        assert fitted(text, file) == text
