"""Checkpoints of real DeepSpeed engines: two and three gloo processes on CPU, a small module, every ZeRO stage."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from launcher.rundir import RunDir
from launcher.spec import BatchPlan, CostModel, Host, RunConfig, RunPlan, plan_to_json

SCRIPT = Path(__file__).parent / "processes" / "checkpoint_cases.py"
TRAINABLE = ["out.bias", "out.weight", "scale", "wide.bias", "wide.weight"]


def make_plan() -> RunPlan:
    return RunPlan(
        run_id="r1",
        created_at="2026-01-01T00:00:00Z",
        version="0",
        run_dir="/nowhere",
        resume_from=None,
        config=RunConfig(),
        hosts=(Host(name="a", gpus=(0, 1)),),
        hosts_source="",
        hosts_assumed=False,
        transport="local",
        device="cpu",
        gpu_kind=None,
        master_addr="127.0.0.1",
        master_port=None,
        precision="fp32",
        precision_reason="",
        attention="reference",
        attention_reason="",
        checkpointed_layers=0,
        lr=1e-2,
        warmup_steps=0,
        arch={"model_type": "small"},
        parameters={},
        trainable={},
        batch=BatchPlan(
            global_size=12,
            max_tokens=0,
            train_rows=None,
            eval_rows=None,
            steps_per_epoch=None,
            total_steps=None,
            micro_steps=None,
        ),
        cost=CostModel(token=1, token_pair=0, patch=0, patch_pair=0),
        deepspeed={},
        memory={},
        env={},
        host_env={},
        cores={},
        commands={},
    )


def run_ranks(folder: Path, mode: str, world_size: int) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    logs = [open(folder / f"{mode}.{rank}.log", "w") for rank in range(world_size)]  # noqa: SIM115
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), mode],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=240) for process in ranks]
    finally:
        for process, log in zip(ranks, logs, strict=True):
            process.kill()
            log.close()
    assert codes == [0] * world_size, (folder / f"{mode}.0.log").read_text()[-4000:]
    return json.loads((folder / f"{mode}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "plan.json").write_text(plan_to_json(make_plan()))
    return folder


@pytest.fixture(scope="module")
def two(folder) -> dict:
    return run_ranks(folder, "two", 2)


@pytest.fixture(scope="module")
def three(folder, two) -> dict:
    return run_ranks(folder, "three", 3)


@pytest.mark.parametrize(
    "case",
    [
        *(f"stage{s}-fp32" for s in range(4)),
        *(f"stage{s}-bf16" for s in range(1, 4)),
        *(f"stage{s}_{kind}" for s in (2, 3) for kind in ("offload", "bf16_states")),
        "dropout",
        "two_groups",
        "stage2-groups",
    ],
)
def test_resume_equals_the_unbroken_run(two, case):
    result = two[case]
    assert result["expected"][0] != result["expected"][2]  # it trains
    assert result["got"] == result["expected"]
    assert result["same_weights"]
    assert result["same_rng"]
    assert result["state"] == {
        "step": 3,
        "position": [0, 3],
        "adam_step": 3,
        "zero_stage": 3 if case == "two_groups" else 2 if case == "dropout" else int(case[5]),
        "world_size": 2,
        "engine": {"global_steps": 3, "skipped_steps": 0},
    }


def test_only_what_trains_is_saved(two, folder):
    """C08, C09: frozen parts come from the base."""
    assert two["stage3-fp32"]["saved"] == TRAINABLE
    files = sorted(RunDir(folder / "stage3-fp32").checkpoint(3).glob("*.safetensors"))
    assert [file.name for file in files] == [f"part-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    kinds = ("master", "exp_avg", "exp_avg_sq")
    assert sorted(tensors) == sorted(f"{kind}/{name}" for kind in kinds for name in TRAINABLE)
    assert tensors["master/wide.weight"].shape == (101, 13)
    assert {file.stat().st_mode & 0o777 for file in files} == {files[0].parent.stat().st_mode & 0o666}


def test_full_weights_have_every_parameter_whole(two):
    """C10: gathered one at a time."""
    for case in ("stage0-fp32", "stage3-bf16"):
        shapes = two[case]["shapes"]
        assert sorted(shapes) == sorted([*TRAINABLE, "frozen.bias", "frozen.weight"])
        assert shapes["wide.weight"] == [101, 13]


@pytest.mark.parametrize(("source", "target"), [(1, 3), (3, 2), (2, 0), (0, 3)])
def test_resume_in_another_stage(two, source, target):
    expected = two[f"stage{source}-fp32"]["expected"]
    assert two[f"stage{source}-to-stage{target}"] == pytest.approx(expected, rel=0, abs=1e-6)


def test_states_move_between_gpu_host_and_formats(two):
    """An offloaded run goes on without, and the other way round; bf16 states round what float32 ones held."""
    for source, target in (("stage2-bf16", "stage3_offload"), ("stage2_offload", "stage1")):
        assert two[f"{source}-to-{target}"] == pytest.approx(two[source]["expected"], rel=0, abs=2e-2)
    for source, target in (("stage3-bf16", "stage2_bf16_states"), ("stage3_bf16_states", "stage1")):
        assert two[f"{source}-to-{target}"] == pytest.approx(two[source]["expected"], rel=0, abs=5e-2)


def test_groups_of_parameters_resume_anywhere(two, three):
    expected = {name: two[name]["expected"] for name in ("two_groups", "stage2-groups")}
    assert expected["two_groups"] != two["stage3-fp32"]["expected"]
    assert two["two_groups-to-stage1"] == pytest.approx(expected["two_groups"], rel=0, abs=1e-6)
    assert two["stage2-groups-to-stage3"] == pytest.approx(expected["stage2-groups"], rel=0, abs=1e-6)
    assert three["groups-3-ranks"] == pytest.approx(expected["two_groups"], rel=0, abs=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_resume_on_another_number_of_ranks(two, three, stage):
    """C05: more or fewer ranks go on with the same numbers."""
    assert three[f"stage{stage}-3-ranks"] == pytest.approx(two[f"stage{stage}-fp32"]["expected"], rel=0, abs=1e-6)


def test_a_failed_write_reaches_every_rank_and_harms_nothing(two):
    """C04."""
    result = two["write_error"]
    (first, is_machine, text), (second, _, other_text) = result["errors"]
    assert (first, is_machine) == ("MachineError", True)
    assert "part-00001" in text or "File too large" in text
    assert second == "RuntimeError"
    assert other_text.startswith("rank 0 failed")
    assert result["after_error"] == "step-000001"
    assert result["after"] == "step-000002"
    assert result["left"] == ["step-000001", "step-000002"]  # the aside folder is gone


def test_other_parameters_are_refused_by_name(two):
    assert "1 trained parameters differ: scale is (1,) there and None here" in two["other_shape"]
