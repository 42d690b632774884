"""Which checkpoint `resume=` means: whole, damaged, unfinished and missing ones."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.fingerprint import fingerprint, misfits
from launcher.rundir import RunDir, complete_checkpoints, damages, file_entry, resolve_resume
from launcher.spec import BatchConfig, DatasetConfig, ModelConfig, RunConfig, TuneConfig
from launcher.training.base import base_of, check_base
from launcher.training.checkpoint import rotate
from tests.tiny import tiny_plan


def make_checkpoint(run: RunDir, step: int, serial: int | None = None) -> Path:
    """A folder as `save` writes it; the tensors' content does not matter here."""
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "part-00001-of-00001.safetensors").write_bytes(b"weights" * 100)
    (folder / "rng.json").write_text("[]")
    files = {file.name: file_entry(file) for file in folder.iterdir()}
    text = json.dumps({"format": 1, "step": step, "serial": serial or step, "files": files})
    (folder / "state.json").write_text(text)
    (folder / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    return folder


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "run")
    make_checkpoint(run, 200)
    make_checkpoint(run, 400)
    return run


def test_a_run_means_its_last_checkpoint(run):
    """C02: what is whole says so itself, so that no file names the last one and can be wrong."""
    for where in (run.path, run.checkpoints, run.checkpoint(400)):
        folder, state = resolve_resume(where)
        assert folder == run.checkpoint(400)
        assert (state["step"], state["notes"]) == (400, [])
    assert resolve_resume(run.checkpoint(200))[1]["step"] == 200


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = [
    (cut, "part-00001-of-00001.safetensors"),
    (flip, "part-00001-of-00001.safetensors"),
    (lambda file: file.write_bytes(b""), "part-00001-of-00001.safetensors"),
    (Path.unlink, "part-00001-of-00001.safetensors"),
    (Path.unlink, "rng.json"),
    (cut, "state.json"),
    (lambda file: file.write_bytes(b"\0" * 50), "state.json"),
    (Path.unlink, "state.json"),
    (lambda file: file.write_bytes(b"\xff\0"), "COMPLETE"),
]


@pytest.mark.parametrize(("harm", "name"), DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_the_file_named(run, harm, name):
    """C02 C03."""
    harm(run.checkpoint(400) / name)
    assert damages(run.checkpoint(400))
    folder, state = resolve_resume(run.path)
    assert folder == run.checkpoint(200)
    (note,) = state["notes"]
    assert "step-000400 is damaged and is passed over" in note
    assert (name if name != "COMPLETE" else "state.json") in note


@pytest.mark.parametrize(("harm", "name"), DAMAGE)
def test_a_damaged_checkpoint_named_on_purpose_is_refused_and_the_previous_offered(run, harm, name):
    """C03."""
    harm(run.checkpoint(400) / name)
    with pytest.raises(ConfigError) as caught:
        resolve_resume(run.checkpoint(400))
    text = str(caught.value)
    assert (name if name != "COMPLETE" else "state.json") in text
    assert f"     try  resume={run.checkpoint(200)}\n" in text


def test_a_save_that_was_cut_short_is_passed_over(run):
    """C04."""
    (run.checkpoint(600)).mkdir()  # renamed, but not marked
    (run.checkpoints / ".step-000800.tmp-x").mkdir()
    folder, state = resolve_resume(run.path)
    assert folder == run.checkpoint(400)
    assert [Path(note.split()[0]).name for note in state["notes"]] == [".step-000800.tmp-x", "step-000600"]
    with pytest.raises(ConfigError, match="the save did not finish"):
        resolve_resume(run.checkpoint(600))


def test_resume_never_means_a_fresh_start(run, tmp_path):
    """C01."""
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("x")
    for where, text in (
        (tmp_path / "none", "no such folder"),
        (file, "not a folder"),
        (empty, "no whole checkpoint"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            resolve_resume(where)
        assert "train from the beginning" in str(caught.value)
    for step in (200, 400):
        (run.checkpoint(step) / "rng.json").unlink()
    with pytest.raises(ConfigError) as caught:
        resolve_resume(run.path)
    assert str(caught.value).count("rng.json is missing") == 2


def test_after_resuming_from_an_earlier_step_the_new_continuation_is_the_last(run):
    shutil.rmtree(run.checkpoint(200))
    make_checkpoint(run, 300, serial=401)
    assert complete_checkpoints(run) == [run.checkpoint(400), run.checkpoint(300)]
    assert resolve_resume(run.path)[0] == run.checkpoint(300)
    assert rotate(run, keep_last=1, best_step=None) == [run.checkpoint(400)]


def test_rotation_keeps_the_last_and_the_best(run):
    for step in (600, 800, 1000):
        make_checkpoint(run, step)
    assert rotate(run, keep_last=2, best_step=400) == [run.checkpoint(200), run.checkpoint(600)]
    assert [folder.name for folder in complete_checkpoints(run)] == ["step-000400", "step-000800", "step-001000"]
    assert rotate(run, keep_last=9, best_step=None) == []
    assert not run.checkpoint(200).exists()


def test_fingerprint_names_what_differs_and_what_to_type():
    def config(**parts) -> RunConfig:
        return RunConfig(
            **{"model": ModelConfig(name="tiny", path="/a/base"), "tune": TuneConfig(name="lora"), **parts}
        )

    arch = {"hidden_size": 8, "dtype": "float32"}
    saved = json.loads(json.dumps(fingerprint(config(), arch)))
    moved = config(model=ModelConfig(name="tiny", path="/elsewhere/base"))
    assert misfits(saved, fingerprint(moved, {**arch, "dtype": "bfloat16"}), "C") == []
    trained = DatasetConfig(name="jsonl", train="/b/a.jsonl", weights=[1.0, 2.0])
    saved |= {key: value for key, value in fingerprint(config(dataset=trained), arch).items() if "dataset" in key}
    other = config(
        model=ModelConfig(name="tiny", path="/a/other"),
        tune=TuneConfig(name="lora", r=16, target_modules="x"),
        batch=BatchConfig(global_size=8),
        dataset=DatasetConfig(name="jsonl", train="/b/c.jsonl"),
    )
    problems = misfits(saved, fingerprint(other, {**arch, "hidden_size": 16}), "C")
    assert [p.tries[0] for p in problems] == [
        "model.path=FOLDER/base",
        "the checkpoint's own model",
        "tune.r=8",
        "tune.target_modules=null",
        "dataset.train=FOLDER/a.jsonl",
        "dataset.weights=[1.0,2.0]",
        "batch.global_size=16",
    ]
    assert problems[2].text == "tune.r=16, but the checkpoint was saved with tune.r=8"
    renamed = fingerprint(config(model=ModelConfig(name="other", path="/a/base"), dataset=trained), {"hidden_size": 16})
    assert [p.tries[0] for p in misfits(saved, renamed, "C")] == ["model=tiny"]  # which has its own structure


def test_frozen_parts_must_come_from_the_weights_that_were_trained_on(tmp_path):
    """C08: by their content, wherever the folder lies and whatever it is called."""
    base, copy = tmp_path / "base", tmp_path / "elsewhere"
    base.mkdir()
    (base / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
    shutil.copytree(base, copy)

    def plan(folder: Path, trained: int = 2, weights: str = "pretrained"):
        made = tiny_plan(tmp_path, model={"path": str(folder), "weights": weights})
        return dataclasses.replace(made, parameters={"language": 10}, trainable={"language": trained, "head": 9})

    state = {"base": base_of(plan(base))}
    assert list(state["base"]) == ["model.safetensors"]
    check_base(plan(copy), state, tmp_path)
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[5::1000] = bytes(len(content[5::1000]))  # an optimizer step changes more
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors differs(.|\n)*try  model\.path="):
        check_base(plan(copy), state, tmp_path)
    check_base(plan(copy, trained=10), state, tmp_path)  # nothing is frozen
    check_base(plan(copy, weights="random"), state, tmp_path)
    check_base(plan(copy), {}, tmp_path)  # saved before this was noted
    check_base(plan(tmp_path / "none"), state, tmp_path)  # loading says that it is not there
