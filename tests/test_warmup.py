"""What a rank's first step would wait for is made while it starts: the right kernels, and nothing that outlives it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from launcher.resources import conf_dir
from launcher.training import precompile, warmup
from launcher.training.attention import padded_attention
from launcher.training.rehearsal import Rehearsal, Sizes, attend_nothing
from launcher.training.warmup import Warmup
from tests.conftest import REPO
from tests.tiny import family_plan

LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen"}


def test_a_step_starts_no_kernel_that_was_not_compiled_ahead(tmp_path: Path) -> None:
    """Specialisations too, as Triton names them; compiled for a GPU that is not there."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    program = [sys.executable, "tests/processes/kernel_cases.py", str(tmp_path)]
    done = subprocess.run(program, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["cases"]) == 4
    for name, (of_step, rehearsed) in found["cases"].items():
        assert of_step and set(of_step) <= set(rehearsed), name
    assert found["failed"] == []
    ahead, afterwards = found["folders"]
    assert ahead == afterwards > 0  # what is started in earnest is found in the cache


def test_a_rehearsal_leaves_no_memory_behind(tmp_path: Path) -> None:
    """While a rank starts no garbage is collected, and what was made until then never is."""
    plan = replace(family_plan(tmp_path, "qwen3_vl", tune=LORA, train={"kernels": "fused"}), precision="bf16")
    rehearsal, kept = Rehearsal(plan, torch.device("cpu")), []
    make = rehearsal.layer

    def layer() -> Any:
        made = make()
        kept.extend(weakref.ref(t) for t in (made.before.weight, made.qkv.members[0].down.weight, made.qkv.together))
        return made

    rehearsal.layer = layer  # type: ignore[method-assign]
    gc.disable()
    try:
        rehearsal.attention(attend_nothing)
        rehearsal.layers(attend_nothing)
        rehearsal.merged_calls()
    finally:
        gc.enable()
    assert len(kept) == 3 and [ref() for ref in kept] == [None] * 3


def test_attention_that_is_padded_is_rehearsed_too(tmp_path: Path) -> None:
    plan = replace(family_plan(tmp_path, "qwen3_vl", tune=LORA, train={"kernels": "fused"}), precision="bf16")
    rehearsal = Rehearsal(plan, torch.device("cpu"), padded=True)
    rehearsal.attention(padded_attention)
    rehearsal.layers(padded_attention)


@pytest.mark.parametrize("name", ["qwen3_5_35b_a3b", "qwen2_5_vl_7b"])  # the first has nothing but experts
def test_sizes_are_those_that_a_model_really_has(name: str) -> None:
    arch = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())["arch"]
    sizes = Sizes.of(arch)
    assert sizes.heads % sizes.key_heads == 0 and sizes.hidden > 0
    assert bool(sizes.inner) == ("experts" not in str(arch))


def test_what_fails_beside_a_start_is_told_and_left_to_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> str:
        raise RuntimeError("CUDA error")

    failing = Warmup(fail)
    failing._thread.start()
    failing.wait()
    assert "failed, and the first step does its work: RuntimeError: CUDA error" in capsys.readouterr().out


def test_kernels_are_compiled_once_for_plans_that_need_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warmup, "DRIVER", tmp_path)
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **_: started.append(argv))
    cpu = replace(family_plan(tmp_path, "qwen3", tune=LORA), precision="bf16")
    plan = replace(cpu, device="cuda", gpu_kind="NVIDIA H200")
    for one, rank in ((cpu, 0), (replace(plan, precision="fp32"), 0), (plan, 1)):
        warmup.start_compiling(one, "plan.json", rank)
    assert started == []
    warmup.start_compiling(plan, "plan.json", 0)
    assert started == [[sys.executable, "-m", "launcher.training", "kernels", "--plan", "plan.json"]]
    precompile.mark_of(plan).parent.mkdir()
    precompile.mark_of(plan).touch()
    warmup.start_compiling(replace(plan, run_dir="/elsewhere", lr=3e-4), "plan.json", 0)
    assert len(started) == 1
    other = replace(plan.config, tune=replace(plan.config.tune, r=64))
    warmup.start_compiling(replace(plan, config=other), "plan.json", 0)
    assert len(started) == 2
