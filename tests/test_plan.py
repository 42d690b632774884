"""Whole plans: golden texts, what is chosen and why, and every problem that stops one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError, Problem
from launcher.families import FAMILIES
from launcher.fingerprint import fingerprint
from launcher.planning.choices import choose_precision
from launcher.planning.describe import describe
from launcher.planning.facts import Resume, TextFile
from launcher.planning.lines import WIDTH
from launcher.planning.placement import place
from launcher.planning.plan import make_plan
from launcher.spec import plan_from_json, plan_to_json
from tests.planning_support import GIB, NOW, compose, gpus, hostfile, known, plan

GOLDEN = Path(__file__).parent / "golden"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"  # accept the new texts on purpose, then read the diff

JSONL = ("dataset=jsonl", "dataset.train=/data/train.jsonl", "dataset.eval=/data/eval.jsonl")
PLANS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "digits": ((), {}),
    "assumed_hosts": (("model=qwen3_vl_reranker_8b", "zero=stage3", "nodes=2"), {}),
    "hostfile": (
        ("model=qwen3_vl_reranker_8b", "zero=stage3", "nodes=2", "cluster.hostfile=hostfiles/example"),
        {"hostfile": hostfile("example")},
    ),
    "lora_two_gpus": (
        ("experiment=reranker_lora", *JSONL[1:], "gpus=2", "env.set.HF_TOKEN=hf_secret", "env.set.NCCL_DEBUG=INFO"),
        {"gpus": gpus(4), "cpu_count": 64, "train_rows": 51200, "eval_rows": 800, "weights_on_disk": True},
    ),
    "full_fields": (
        ("model=qwen3_vl_2b", "tune=full", "zero=stage2", *JSONL, "cluster.gpu=a100_80g", "cluster.master_port=29501"),
        {"hostfile": hostfile("example_fields"), "eval_rows": 10},
    ),
    "auto_one_gpu": (("model=qwen3_vl_reranker_8b", "zero=auto", *JSONL, "gpus=1", "cluster.gpu=h200"), {}),
    "auto_72b": (("model=qwen2_5_vl_72b", "zero=auto", *JSONL, "gpus=2", "cluster.gpu=h200"), {}),
    "auto_hosts": (("model=qwen3_vl_32b", "tune=full", "zero=auto", *JSONL, "nodes=4", "cluster.gpu=h100"), {}),
    "experts": (("model=qwen3_vl_30b_a3b", "zero=stage3", *JSONL, "gpus=4", "cluster.gpu=a100_80g"), {}),
    "qlora": (("model=qwen2_5_vl_72b", "tune=qlora", *JSONL, "gpus=1", "cluster.gpu=h200"), {}),
    "offload": (("model=qwen3_vl_8b", "tune=full", "zero=stage3_offload", *JSONL, "gpus=2", "cluster.gpu=h100"), {}),
    "chats": (
        ("model=qwen3_8b", "task=sft", "loss=cross_entropy", "tune=full", *JSONL, "gpus=8", "cluster.gpu=h100"),
        {},
    ),
    "copies": (("model=qwen3_vl_32b", "zero=stage3_hpz", *JSONL, "nodes=2", "cluster.gpu=h100"), {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_golden_plans(name: str) -> None:
    """X01."""
    words, facts = PLANS[name]
    text = describe(plan(*words, **facts)) + "\n"
    path = GOLDEN / f"{name}.txt"
    if UPDATE:
        path.write_text(text)
    assert text == path.read_text()
    assert "hf_secret" not in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("name", PLANS)
def test_plans_survive_json(name: str) -> None:
    words, facts = PLANS[name]
    made = plan(*words, **facts)
    assert plan_from_json(plan_to_json(made)) == made


def test_the_first_line_says_where_hosts_come_from() -> None:
    assert describe(plan("nodes=2")).startswith("Warning: no host is known: planned for 2 assumed hosts of 8 GPUs")
    assert plan("nodes=2").hosts_assumed
    first = describe(plan(hostfile=hostfile("example"))).splitlines()[0]
    assert first == "Hosts  hostfiles/example: all 2 hosts"
    assert not plan(hostfile=hostfile("example")).hosts_assumed


def test_hosts_gpus_and_filters() -> None:
    assert [h.gpus for h in plan(gpus=gpus(4)).hosts] == [(0, 1, 2, 3)]
    visible = {"gpus": gpus(8)[2:4], "visible_devices": "2,3"}
    made = plan("gpus=[1]", **visible)
    assert [h.gpus for h in made.hosts] == [(3,)]
    assert made.hosts_source == "this machine (CUDA_VISIBLE_DEVICES=2,3)"
    assert plan("gpus=3").world_size == 3  # ranks, on a machine without a GPU
    made = plan("cluster.include=worker-2", hostfile=hostfile("example"))
    assert [h.name for h in made.hosts] == ["worker-2"]
    assert made.device == "cuda"
    made = plan("cluster.gpu=t4", "gpus=1")
    assert (made.hosts_assumed, made.gpu_kind, made.precision) == (True, "t4", "fp16")
    local = plan(hostfile=TextFile(path="h", text="desk slots=3\n"))
    assert (local.device, local.world_size, local.env["OMP_NUM_THREADS"]) == ("cpu", 3, "1")
    assert plan(hostfile=TextFile(path="h", text="desk slots=2\n"), gpus=gpus(2)).gpu_kind == "NVIDIA H200"


def test_precision_and_attention_have_reasons() -> None:
    made = plan(gpus=gpus(1))
    assert (made.precision, made.precision_reason) == ("bf16", "NVIDIA H200, compute capability 9.0")
    assert made.attention == "auto"
    made = plan(gpus=gpus(1, "Tesla T4", 14.7, (7, 5)))
    assert (made.precision, made.precision_reason) == ("fp16", "compute capability 7.5 has no bf16")
    assert "fp16, dynamic loss scale from 4,096 (compute capability 7.5 has no bf16)" in describe(made)
    made = plan("precision=bf16", "attention=sdpa")
    assert (made.precision, made.attention) == ("bf16", "reference")
    assert made.attention_reason == "exact, for CPU"
    assert plan("attention=sdpa", gpus=gpus(1)).attention == "sdpa"


def test_fp16_is_refused_where_it_overflows_or_cannot_run() -> None:
    """G01, G02."""
    config, t4 = compose("model=tiny"), gpus(1, "Tesla T4", 14.7, (7, 5))
    placement, overflowing = place(config, known(config, gpus=t4)), FAMILIES["qwen2_5_vl"]
    assert choose_precision(config, placement, overflowing)[0] == "fp32"
    words = ("model=tiny", "precision=fp16")
    with pytest.raises(ConfigError, match=r"known to overflow(.|\n)*try  precision=fp32(.|\n)*precision.force=true"):
        choose_precision(compose(*words), placement, overflowing)
    assert choose_precision(compose(*words, "precision.force=true"), placement, overflowing)[0] == "fp16"
    with pytest.raises(ConfigError, match=r"precision=fp16 needs a GPU"):
        plan(*words)
    with pytest.raises(ConfigError, match=r"bf16 needs 8.0(.|\n)*try  precision=fp16"):
        plan("model=tiny", "precision=bf16", gpus=t4)
    with pytest.raises(ConfigError, match=r"add up gradients in fp16"):
        plan(*words, "zero=stage0", gpus=t4)


def test_parts_have_their_own_rates() -> None:
    made = plan("model=tiny", "tune=lora", "tune.projector=full", "optim.lr=1e-4", "optim.lr_projector=5e-6")
    assert "lr 0.0001 language, 5e-06 projector, cosine" in describe(made)
    with pytest.raises(ConfigError, match=r"optim.lr_vision=1e-5 has no effect with tune.vision=frozen"):
        compose("model=tiny", "optim.lr_vision=1e-5")


def test_patience_needs_evaluations() -> None:
    with pytest.raises(ConfigError, match="no rows are held out"):
        plan("model=tiny", *JSONL[:2], "eval.patience=2")
    with pytest.raises(ConfigError, match="one at the end only"):
        plan("model=tiny", "eval.patience=2", "eval.every_steps=null")


def test_learning_rate_by_what_trains() -> None:
    assert plan("model=tiny", "tune=lora").lr == 1e-4
    assert plan("model=tiny", "tune=full").lr == 1e-5
    assert plan("model=tiny", "tune=lora", "tune.projector=full").lr == 1e-5
    assert plan("model=tiny", "optim.lr=2e-3").lr == 2e-3


def test_steps() -> None:
    made = plan("model=tiny", *JSONL, "batch.global_size=16", "train.epochs=1.5", train_rows=100).batch
    assert (made.steps_per_epoch, made.total_steps) == (7, 11)
    made = plan("model=tiny", *JSONL, "dataset.max_rows=33", "train.epochs=1", train_rows=100).batch
    assert (made.train_rows, made.total_steps) == (33, 3)
    made_plan = plan("model=tiny", *JSONL, train_rows=None)
    assert made_plan.batch.total_steps is None
    assert made_plan.warmup_steps is None
    assert "not known: the rows are not counted" in describe(made_plan)


def test_memory_decides_micro_batch_and_recomputation() -> None:
    words = ("model=qwen3_vl_8b", *JSONL, "zero=stage2")
    large, small = plan(*words, gpus=gpus(1)), plan(*words, gpus=gpus(1, "NVIDIA GeForce RTX 4090", 24.0, (8, 9)))
    assert large.checkpointed_layers < small.checkpointed_layers <= 36
    for made, gib in ((large, 140.4), (small, 24.0)):
        assert made.batch.max_tokens % 1024 == 0
        assert made.batch.max_tokens >= 4096
        assert sum(made.memory.values()) <= 0.95 * gib * GIB
    with pytest.raises(ConfigError, match=r"zero=stage2(.|\n)*more than the 14.7 GiB of a GPU \(Tesla T4\)"):
        plan(*words, gpus=gpus(1, "Tesla T4", 14.7, (7, 5)))
    fixed = plan(*words, "batch.max_tokens=5000", "memory.gradient_checkpointing=7", gpus=gpus(1))
    assert (fixed.batch.max_tokens, fixed.checkpointed_layers) == (5000, 7)
    shards = [plan(*words[:-1], f"zero=stage{s}", "tune=full", gpus=gpus(8)).memory for s in (1, 2, 3)]
    assert shards[0]["gradients"] > shards[1]["gradients"]
    assert shards[0]["optimizer moments"] == shards[1]["optimizer moments"]
    assert shards[1]["trained weights"] > 7 * shards[2]["trained weights"]


def test_run_folder_names() -> None:
    """Y16 Y17."""
    assert plan().run_dir == "/home/me/runs/20260102-030405-tiny-full-stage2"
    taken = ("20260102-030405-tiny-full-stage2", "20260102-030405-tiny-full-stage2-2")
    assert plan(taken=taken).run_dir.endswith("-tiny-full-stage2-3")
    assert plan("run.name=mine").run_dir == "/home/me/runs/mine"
    assert plan("run.dir=/elsewhere/mine").run_dir == "/elsewhere/mine"
    arch = compose("model=tiny").model.arch
    odd = plan("model.path='/models/Mine (v1), [best] é'", arch=arch).run_dir
    assert odd == "/home/me/runs/20260102-030405-Mine-v1-best-lora-stage2"
    long = plan(f"model.path=/models/{'x' * 250}", arch=arch).run_dir
    assert long == f"/home/me/runs/20260102-030405-{'x' * 60}-lora-stage2"


def resume(*words: str, step: int = 5, changed: tuple[str, ...] = ()) -> Resume:
    """A checkpoint saved by the run that `words` started."""
    config = compose(*words, *changed)
    state = {"step": step, "fingerprint": fingerprint(config, config.model.arch), "notes": ["step-000009 is damaged"]}
    return Resume(checkpoint="/r/old/checkpoints/step-000005", run_dir="/r/old", state=state)


def test_a_finished_run_without_its_export_can_be_resumed() -> None:
    ended = dataclasses.replace(resume(step=400), exported=False)
    assert plan(resume=ended).batch.total_steps == 400
    with pytest.raises(ConfigError, match="nothing is left to train"):
        plan("checkpoint.export=false", resume=ended)


def test_resume_goes_on_in_its_own_folder() -> None:
    made = plan(resume=resume())
    assert (made.run_dir, made.resume_from) == ("/r/old", "/r/old/checkpoints/step-000005")
    assert "step-000009 is damaged" in made.warnings
    assert plan("run.dir=/r/old", resume=resume(), run_dir_used=True).run_dir == "/r/old"


@pytest.mark.parametrize(
    ("words", "facts", "text", "attempt"),
    [
        (("nodes=3",), {"hostfile": hostfile("example")}, "nodes=3, but hostfiles/example has 2 hosts", "nodes=2"),
        (("gpus=9",), {"hostfile": hostfile("example")}, "gpus=9, but worker-1 has 8 slots", "gpus=8"),
        (("gpus=3",), {"gpus": gpus(2)}, "gpus=3, but localhost has 2 slots: 0,1", "gpus=2"),
        (("gpus=2", "cluster.include=worker-1"), {"hostfile": hostfile("example")}, "cannot be combined", "gpus=null"),
        (("nodes=1", "cluster.exclude=worker-1"), {"hostfile": hostfile("example")}, "combined", "nodes=null"),
        (
            (),
            {"hostfile": TextFile(path="h", text="localhost slots=1\nb slots=1\n")},
            "127.0.0.1",
            "cluster.master_addr",
        ),
        ((), {"hostfile": TextFile(path="h", text="a slots=1 slot=2\n")}, "unknown field slot", "a slots=8"),
        (("cluster.gpu=h1000", "nodes=2"), {}, "cluster.gpu=h1000 is no kind of GPU", "cluster.gpu=h100"),
        (("cluster.gpu=V100",), {}, "which one? It is made with 32 GB or 16 GB", "cluster.gpu=v100_16g"),
        (("cluster.gpu=2080ti",), {}, "these are: b200, h200", "cluster.gpu=null"),
        (("tune=qlora",), {"lacks_bits": True}, "tune=qlora: bitsandbytes is needed", "tune=lora "),
        (("optim=adamw8bit",), {"lacks_bits": True, "gpus": gpus(1)}, "bitsandbytes is needed", "pip install bits"),
        (
            ("precision=bf16", "cluster.gpu=t4"),
            {},
            "t4 has compute capability 7.5, and bf16 needs 8.0",
            "precision=fp32",
        ),
        (("zero=stage0",), {"gpus": gpus(1)}, "zero stage 0 in bf16", "zero=stage1"),
        (("model=tiny", "tune=lora", "tune.lora_dropout=0.1"), {}, "would not be exact", "tune.lora_dropout=0"),
        (("model=tiny", "tune=lora", "checkpoint.merge=false"), {}, "fits no model", "checkpoint.merge=true"),
        (("loss=pairwise", "loss.form=kl"), {}, "no form of loss=pairwise", "loss.form=ranknet"),
        (("loss=distill", "loss.form=margin"), {}, "whose forms are margin_mse and kl", "loss.form=margin_mse"),
        (("loss=cross_entropy",), {}, "does not fit task=rerank", "loss=pointwise"),
        (("loss=distill", "dataset.random_negatives=2"), {}, "no teacher's score", "dataset.random_negatives=0"),
        (
            ("model=tiny", "dataset=jsonl", "dataset.train=[a.jsonl,b.jsonl]", "dataset.weights=[2]"),
            {},
            "dataset.weights=[2.0] has 1 numbers, and dataset.train names 2 sources",
            "dataset.weights=[1,1]",
        ),
        (("tune=lora", "tune.target_modules='.*qkv'"), {}, "modules of vision", "tune.vision=lora"),
        (("tune.language=frozen", "tune.vision=frozen", "tune.projector=frozen"), {}, "nothing trains", "tune=lora"),
        (("model.min_pixels=9000",), {}, "above model.max_pixels=4096", "model.min_pixels=4096"),
        (
            ("model=tiny", "dataset=jsonl", "dataset.train=a", "dataset.min_pixels=9", "dataset.max_pixels=8"),
            {},
            "dataset.min_pixels=9 is above dataset.max_pixels=8",
            "dataset.min_pixels=8",
        ),
        (
            ("model=tiny", "dataset=jsonl", "dataset.train=a", "dataset.video.max_frames=2"),
            {},
            "dataset.video.min_frames=4 is above dataset.video.max_frames=2",
            "dataset.video.min_frames=2",
        ),
        (
            ("memory.gradient_checkpointing=5",),
            {},
            "the model has 4 decoder layers",
            "memory.gradient_checkpointing=all",
        ),
        (("run.name=mine",), {"run_dir_used": True}, "runs/mine exists and is not empty", "run.name=ANOTHER"),
        (
            ("run.name=mine",),
            {"run_dir_used": True, "run_dir_saved": True},
            "runs/mine exists and is not empty",
            "resume=",
        ),
        ((), {"disk_free_bytes": 10**6}, "are free for /home/me/runs", "checkpoint.keep_last=1"),
        ((), {"resume": resume(changed=("train.seed=7",))}, "train.seed=42, but the checkpoint", "train.seed=7"),
        ((), {"resume": resume(changed=("tune.vision=frozen",))}, "tune.vision=full", "tune.vision=frozen"),
        ((), {"resume": resume(step=400)}, "nothing is left to train", "train.max_steps=800"),
        (("env.set.RANK=1",), {}, "RANK is set for each rank", "remove the variable"),
        ((), {"env_file": TextFile(path="e", text="A=1\nB\n")}, "'B' has no =", "NAME=VALUE"),
        ((), {"problems": (Problem("a file is missing", tries=("make it",)),)}, "a file is missing", "make it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_problems(words: tuple[str, ...], facts: dict[str, Any], text: str, attempt: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*words, **facts)
    found = [p for p in caught.value.problems if text in p.text]
    assert found, caught.value.render()
    assert any(attempt in line for line in found[0].tries)


def test_what_cannot_be_computed_hides_nothing_that_does_not_fit() -> None:
    """Nor does either hide the disk; the memory is that of what `auto` would take."""
    words = ("model=qwen3_vl_8b", "tune=full", *JSONL, "attention=flash_attention_2", "precision=bf16", "gpus=1")
    with pytest.raises(ConfigError) as caught:
        plan(*words, gpus=gpus(1, "Tesla T4", 14.7, (7, 5)), disk_free_bytes=10**6)
    texts = [problem.text for problem in caught.value.problems]
    for told in ("precision=bf16, but Tesla T4", "attention=flash_attention_2 needs", "more than the 14.7 GiB", "disk"):
        assert any((told if told != "disk" else "are free for /home/me/runs") in text for text in texts), told
    tries = next(problem.tries for problem in caught.value.problems if "more than the 14.7 GiB" in problem.text)
    mended = (*words[:-3], "gpus=1", *tries[0].partition("   ")[0].split())
    plan(*mended, gpus=gpus(1, "Tesla T4", 14.7, (7, 5)), disk_free_bytes=2**50, ram_bytes=2**50)


def test_a_run_that_saves_nothing_needs_no_disk() -> None:
    off = ("every_steps=null", "at_end=false", "keep_best=false", "export=false")
    plan(*(f"checkpoint.{key}" for key in off), disk_free_bytes=10**6)


def test_problems_of_all_kinds_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(
            "tune=lora",
            "nodes=9",
            "tune.target_modules='.*qkv'",
            "model.min_pixels=9000",
            hostfile=hostfile("example"),
            problems=(Problem("dataset.train=x: no such file", tries=("dataset.train=FILE",)),),
        )
    assert len(caught.value.problems) == 5
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("words", "facts", "text"),
    [
        (
            ("model=qwen3_vl_2b",),
            {"ram_bytes": 2**41},
            "the data set is digits, because none was named beside model=qwen3_vl_2b",
        ),
        (
            ("model=qwen3_vl_8b",),
            {"ram_bytes": 2**41},
            "the weights of Qwen/Qwen3-VL-8B-Instruct (17.5 GB) are not on this machine",
        ),
        (("model=tiny", *JSONL), {"train_rows": 7}, "dataset.train has 7 rows, fewer than batch.global_size=16"),
        (("optim.lr=2",), {}, "optim.lr=2 is far above what AdamW trains such models with"),
        (("gpus=17",), {}, "17 ranks share batch.global_size=16 queries"),
        (("model=tiny", *JSONL[:2]), {}, "nothing is evaluated, because dataset.eval names no file"),
        (("model=qwen3_vl_2b", "gpus=1"), {}, "it may run out of memory (try  memory.gradient_checkpointing=all "),
        (("profile=torch", "profile.steps=1000", "train.max_steps=2000"), {}, "every operator of 1000 steps in memory"),
        (("profile=torch", "profile.first_step=99"), {}, "the evaluation after step 100, which takes memory"),
        (
            ("profile=nsys", "eval.every_steps=2"),
            {"gpus": gpus(1)},
            "files large: profile.first_step=11 profile.steps=2",
        ),
        (
            ("model=qwen3_vl_reranker_2b", "loss=listwise"),
            {"ram_bytes": 2**41},
            "need no longer be probabilities",
        ),  # R16
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_warnings(words: tuple[str, ...], facts: dict[str, Any], text: str) -> None:
    assert any(text in warning for warning in plan(*words, **facts).warnings)


def test_the_demo_has_no_warning() -> None:
    assert plan().warnings == ()


def test_random_weights_of_any_size_need_no_download() -> None:
    made = plan("model=qwen3_vl_32b", "model.weights=random", *JSONL, "nodes=4", eval_rows=5)
    assert not any("download" in warning for warning in made.warnings)
    assert any("keep their random weights" in warning for warning in made.warnings)


def test_a_folders_own_config_replaces_the_table() -> None:
    arch = compose("model=tiny").model.arch
    config = compose("model=qwen3_vl_8b", "model.path=/models/mine", *JSONL)
    made = make_plan(config, known(config, arch=arch, weights_on_disk=True), now=NOW)
    assert made.parameters == plan().parameters
    assert made.arch == arch
    assert made.run_dir.endswith("-mine-lora-stage2")
