"""What is looked at before a plan: files, rows, GPUs, folders; each failure a problem, all of them together."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.planning.plan import make_plan
from launcher.running import facts as facts_module
from launcher.running.facts import DIGITS_ROWS, gather_facts
from tests.planning_support import NOW, compose

NO_TENSORS = b"\2" + bytes(7) + b"{}"  # a whole file of weights
SMI = """\
0, GPU-aaaa1111, NVIDIA H200, 143771, 9.0
1, GPU-bbbb2222, NVIDIA H200, 143771, 9.0
2, GPU-bbbb3333, NVIDIA H200, 143771, 9.0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def three_gpus(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose `nvidia-smi` lists three GPUs."""
    tool = here / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return here


def test_the_demo_needs_nothing(here: Path) -> None:
    facts = gather_facts(compose())
    assert facts.problems == ()
    assert (facts.train_rows, facts.eval_rows) == (DIGITS_ROWS["train"], DIGITS_ROWS["eval"])
    assert facts.zero_file is not None
    assert facts.cpu_count >= 1
    assert list(here.iterdir()) == [], "looking changes nothing"


def test_digits_rows_are_those_that_training_makes() -> None:
    digits = importlib.import_module("launcher.training.digits")
    assert DIGITS_ROWS == {"train": digits.TRAIN_GROUPS, "eval": digits.EVAL_GROUPS}


def test_rows_are_lines_that_hold_something(here: Path) -> None:
    (here / "t.jsonl").write_text('{"a": 1}\n\n  \r\n{"a": 2}\n{"a": 3}')
    config = compose("model=tiny", "dataset=jsonl", f"dataset.train={here}/t.jsonl")
    assert gather_facts(config).train_rows == 3


def test_everything_that_is_missing_is_told_together(here: Path) -> None:
    (here / "empty.jsonl").write_text("\n\n")
    (here / "latin1.env").write_bytes(b"A=\xe9\n")
    (here / "model").mkdir()
    words = [
        "model=qwen3_vl_2b",
        f"model.path={here}/model",
        "dataset=jsonl",
        f"dataset.train={here}/no.jsonl",
        f"dataset.eval={here}/empty.jsonl",
        f"cluster.hostfile={here}/hosts",
        "zero.file=stage9.json",
        f"zero.config={here}/zero.json",
        f"env.file={here}/latin1.env",
        f"resume={here}/old",
        f"run.dir={here}/empty.jsonl/run",
    ]
    config = compose(*words)
    with pytest.raises(ConfigError) as caught:
        make_plan(config, gather_facts(config), now=NOW)
    text = caught.value.render()
    for said in (
        f"dataset.train={here}/no.jsonl: no such file",
        f"dataset.eval={here}/empty.jsonl has no rows",
        f"cluster.hostfile={here}/hosts: no such file",
        "zero.file=",
        "ds_configs/stage9.json: no such file",
        f"zero.config={here}/zero.json: no such file",
        "byte 2 is not UTF-8",
        f"{here}/model/config.json",
        "no *.safetensors in it",
        f"resume={here}/old",
        "the run folder cannot be made",
    ):
        assert said in text
    assert all(problem.tries for problem in caught.value.problems), text


def test_missing_and_broken_model_folders(here: Path) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text('{\n"a": }')
    for path, said in (("none", "no such folder"), ("model", "config.json:2: Expecting value")):
        config = compose("model=tiny", f"model.path={here}/{path}", "model.weights=random")
        with pytest.raises(ConfigError, match=said):
            make_plan(config, gather_facts(config), now=NOW)


def test_a_folder_without_an_adapter_is_told_before_a_run_starts(here: Path) -> None:
    words = ("model=tiny", "tune=lora", f"model.adapter={here}/none")
    (problem,) = gather_facts(compose(*words)).problems
    assert "no adapter_config.json in it" in problem.text
    (here / "none").mkdir()
    (here / "none" / "adapter_config.json").touch()
    assert gather_facts(compose(*words)).problems == ()


def test_a_file_of_nearly_that_name_is_proposed(here: Path) -> None:
    (here / "train rows.jsonl").write_text("{}")
    for name, tried in (
        ("trainrows.jsonl", "'dataset.train=\"{}/train rows.jsonl\"'"),
        ("other.txt", "dataset.train=FILE"),
    ):
        config = compose("model=tiny", "dataset=jsonl", f"dataset.train={name}")
        (problem,) = gather_facts(config).problems
        assert problem.tries == (tried.format(here),)


def test_missing_weight_files_are_named(here: Path) -> None:
    folder = here / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(compose("model=tiny").model.arch))
    (folder / "a.safetensors").write_bytes(NO_TENSORS)
    index = folder / "model.safetensors.index.json"
    config = compose("model=tiny", f"model.path={folder}", "model.weights=pretrained")
    for text, said in (
        ('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}', "lacks 1 of 2 weight files: b.safetensors"),
        ("{", "model.safetensors.index.json cannot be read"),
    ):
        index.write_text(text)
        assert [said in problem.text for problem in gather_facts(config).problems] == [True]
    index.write_text('{"weight_map": {"x": "a.safetensors"}}')
    assert gather_facts(config).problems == ()
    (folder / "a.safetensors").write_bytes(NO_TENSORS[:-1])
    (problem,) = gather_facts(config).problems
    assert problem.text.startswith(f"{folder}/a.safetensors is damaged") and problem.tries


def test_a_model_folder_is_read(here: Path) -> None:
    arch = compose("model=tiny").model.arch
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(arch))
    (here / "model" / "model.safetensors").write_bytes(NO_TENSORS)
    config = compose("model=qwen3_vl_8b", f"model.path={here}/model", "model.weights=pretrained")
    facts = gather_facts(config)
    assert facts.arch == arch
    assert facts.weights_on_disk
    assert facts.problems == ()


def test_weights_in_the_hub_cache_are_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(here))
    config = compose("model=qwen3_vl_reranker_2b")
    assert not gather_facts(config).weights_on_disk
    snapshot = here / "models--Qwen--Qwen3-VL-Reranker-2B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    assert gather_facts(config).weights_on_disk


def test_hosts_come_from_the_named_file_else_from_hostfiles_default(here: Path) -> None:
    assert gather_facts(compose()).hostfile is None
    (here / "hostfiles").mkdir()
    (here / "hostfiles" / "default").write_text("a slots=2\n")
    (here / "other").write_text("b slots=2\n")
    default, other = gather_facts(compose()).hostfile, gather_facts(compose(f"cluster.hostfile={here}/other")).hostfile
    assert default is not None
    assert other is not None
    assert (default.path, default.text) == ("hostfiles/default", "a slots=2\n")
    assert (other.path, other.text) == ("other", "b slots=2\n")


def test_used_run_folders(here: Path) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    assert not gather_facts(compose(f"run.dir={here}/runs/mine")).run_dir_used
    (here / "runs" / "mine" / "plan.json").touch()
    facts = gather_facts(compose(f"run.dir={here}/runs/mine"))
    assert facts.run_dir_used and not facts.run_dir_saved
    (here / "runs/mine/checkpoints/step-000002").mkdir(parents=True)
    (here / "runs/mine/checkpoints/step-000002/COMPLETE").touch()
    assert gather_facts(compose(f"run.dir={here}/runs/mine")).run_dir_saved
    config = compose(f"run.root={here}/runs", "run.name=mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        make_plan(config, gather_facts(config), now=NOW)
    assert gather_facts(compose(f"run.root={here}/runs")).taken == ("mine",)


def test_gpus_of_nvidia_smi(three_gpus: Path) -> None:
    facts = gather_facts(compose())
    assert [gpu.index for gpu in facts.gpus] == [0, 1, 2]
    assert facts.gpus[0].capability == (9, 0)
    assert facts.gpus[0].memory_bytes == 143771 * 2**20


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,0", [2, 0]),
        ("", []),
        ("GPU-bbbb2222", [1]),
        ("GPU-aaaa", [0]),
        (" 1 , 2 ", [1, 2]),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,-1,2", [1]),
    ],
)
def test_visible_devices(three_gpus: Path, monkeypatch: pytest.MonkeyPatch, visible: str, indices: list[int]) -> None:
    """F02 F09: numbers and UUIDs of CUDA_VISIBLE_DEVICES are this machine's GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts = gather_facts(compose())
    assert ([gpu.index for gpu in facts.gpus], facts.visible_devices) == (indices, visible)
    assert facts.problems == ()


@pytest.mark.parametrize(
    ("visible", "why"),
    [
        ("7", "7 is none of this machine's GPUs, 0, 1, 2"),
        ("GPU-bbbb", "GPU-bbbb is none of this machine's GPUs, 0, 1, 2"),
        ("1,x", "x is none of this machine's GPUs, 0, 1, 2"),
        ("1,GPU-bbbb2222", "GPU-bbbb2222 is named twice"),
        ("MIG-1234", "MIG-1234 is a part of a GPU, and DeepSpeed gives ranks whole ones by number"),
    ],
)
def test_visible_devices_that_cannot_be_used(
    three_gpus: Path, monkeypatch: pytest.MonkeyPatch, visible: str, why: str
) -> None:
    """F09: parts of a GPU are named."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (problem,) = gather_facts(compose()).problems
    assert problem.text == f"CUDA_VISIBLE_DEVICES={visible}: {why}"


def test_the_environment_and_own_addresses_are_facts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (here / "hosts").write_text("root@127.0.0.2 slots=1\nb slots=1 addr=192.0.2.1\n[::1] slots=1 # 127.0.0.3\n")
    facts = gather_facts(compose(f"cluster.hostfile={here}/hosts"))
    assert facts.environ["SLURM_JOB_ID"] == "7"
    assert set(facts.addresses) - {"::1"} == {"127.0.0.2", "127.0.0.3"}, "192.0.2.1 is nobody's"


def test_nvidia_smi_that_finds_no_gpu(three_gpus: Path) -> None:
    (three_gpus / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho No devices were found\n")
    assert gather_facts(compose()).gpus == ()


def test_gpus_without_nvidia_smi(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setattr(facts_module, "PROC_GPUS", here / "gpus")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert gather_facts(compose()).gpus == ()
    for minor, slot in ((1, "0000:02:00.0"), (0, "0000:01:00.0")):
        folder = here / "gpus" / slot
        folder.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA L4\nIRQ:   \t\t 24\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n"
        (folder / "information").write_text(text)
    facts = gather_facts(compose())
    assert [(gpu.index, gpu.name) for gpu in facts.gpus] == [(0, "NVIDIA L4"), (1, "NVIDIA L4")]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert gather_facts(compose()).gpus == ()
