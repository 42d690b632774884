"""Activation memory against torch's own allocations, one by one, for every family (tests/memory_trace.py).

TOLERANCE is honest: most combinations agree within 0.3 %. What remains are a few tensors of one number a row, blocks
of 512 bytes, and the loop over chunks of Qwen3.5's layers without attention, whose last chunk frees earlier.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import arithmetic
from launcher.estimates import Load
from launcher.planning.activations import activations
from launcher.planning.setting import Setting
from launcher.planning.shapes import read_shape
from launcher.planning.states import states
from launcher.resources import conf_dir
from launcher.spec import RunPlan
from launcher.training import backbone
from launcher.training.fused import layer as fused_layer
from tests.memory_trace import Prompts, make_scorer, trace
from tests.tiny import family_plan

TOLERANCE = 0.01
CHUNKED = 0.02  # Qwen3.5: see above

LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen"}
FULL = {"name": "full", "language": "full", "vision": "full", "projector": "full"}
FROZEN_TOWER = {**FULL, "vision": "frozen", "projector": "frozen"}
PROJECTOR = {**FULL, "language": "frozen", "vision": "frozen"}
ADAPTED_TOWER = {**LORA, "vision": "lora", "projector": "lora"}
MIXED = {**LORA, "vision": "full"}
QLORA = {**LORA, "name": "qlora"}
SFT = {"task": {"name": "sft"}, "loss": {"name": "cross_entropy"}}
PLAIN = {"train": {"kernels": "plain"}}  # else decoder layers are computed by the fused functions, as on a GPU
SHARDED = {"stage": 3}

TEXT = Prompts(groups=2, prefix=800, documents=4, length=3600)
ALONE = Prompts(groups=3, documents=1, length=1500)
CHATS = Prompts(groups=2, documents=1, length=1500, answers=700)
PAGES = Prompts(groups=2, prefix=200, documents=2, length=2800, grid=(24, 24))
QUERY_IMAGE = Prompts(groups=2, prefix=900, documents=4, length=600, grid=(24, 32), in_prefix=True)
MANY_PATCHES = Prompts(groups=1, documents=2, length=900, grid=(48, 64))
UNEQUAL = Prompts(groups=2, documents=2, length=600, longer=40)  # padding: these models take no packed rows
UNEQUAL_PAGES = replace(UNEQUAL, grid=(16, 24))

CASES: list[tuple[str, str, dict[str, Any], Prompts, int, str, dict[str, Any]]] = [
    ("lora", "qwen3", LORA, TEXT, 0, "bf16", {}),
    ("all recomputed", "qwen3", LORA, TEXT, 2, "bf16", {}),
    ("plain", "qwen3", LORA, TEXT, 1, "bf16", PLAIN),
    ("no prefix, dropout", "qwen3", {**LORA, "lora_dropout": 0.1}, ALONE, 0, "fp16", {}),
    ("float16", "qwen3", LORA, ALONE, 0, "fp16", {}),
    ("dora", "qwen2", {**LORA, "use_dora": True}, TEXT, 0, "bf16", {}),
    ("full", "qwen2", FROZEN_TOWER, TEXT, 1, "bf16", {}),
    ("weights sharded", "qwen3_vl", LORA, PAGES, 1, "bf16", SHARDED),
    ("large ranks, sharded", "qwen3", {**LORA, "r": 40}, TEXT, 0, "bf16", SHARDED),
    ("few adapters", "qwen2_5_vl", {**LORA, "target_modules": r".*layers.*\.(o_proj|up_proj)"}, PAGES, 0, "bf16", {}),
    ("4-bit weights", "qwen2_5_vl", QLORA, TEXT, 1, "bf16", {}),
    ("chats, tied head trains", "qwen3", FROZEN_TOWER, CHATS, 1, "bf16", SFT),
    ("chats, frozen head", "qwen3", LORA, CHATS, 2, "bf16", SFT),
    ("chats, plain", "qwen3", LORA, CHATS, 0, "bf16", SFT | PLAIN),
    ("pages", "qwen3_vl", LORA, PAGES, 2, "bf16", {}),
    ("pages, plain", "qwen3_vl", LORA, PAGES, 0, "bf16", PLAIN),
    ("image in the query", "qwen3_vl", LORA, QUERY_IMAGE, 0, "bf16", {}),
    ("float32", "qwen3_vl", LORA, PAGES, 0, "fp32", {}),
    ("everything trains", "qwen3_vl", FULL, PAGES, 0, "bf16", {}),
    ("everything recomputed", "qwen3_vl", FULL, PAGES, 2, "bf16", {}),
    ("everything trains, plain", "qwen3_vl", FULL, PAGES, 1, "bf16", PLAIN),
    ("projector", "qwen3_vl", PROJECTOR, PAGES, 0, "bf16", {}),
    ("adapters in the tower", "qwen3_vl", ADAPTED_TOWER, MANY_PATCHES, 1, "bf16", PLAIN),
    ("tower whole, adapters", "qwen3_vl", MIXED, MANY_PATCHES, 2, "bf16", {}),
    ("windows", "qwen2_5_vl", FULL, PAGES, 0, "bf16", {}),
    ("windows, recomputed", "qwen2_5_vl", LORA, PAGES, 2, "bf16", {}),
    ("experts, full", "qwen3_vl_moe", FULL, PAGES, 1, "bf16", {}),
    ("delta net", "qwen3_5", LORA, UNEQUAL_PAGES, 0, "bf16", {}),
    ("delta net, recomputed", "qwen3_5", LORA, UNEQUAL, 2, "bf16", {}),
    ("delta net, experts", "qwen3_5_moe", FULL, UNEQUAL_PAGES, 0, "bf16", {}),
]


def setting_of(plan: RunPlan) -> Setting:
    """What the planner would know of a plan."""
    return Setting(
        config=plan.config,
        shape=read_shape(plan.config.model, plan.arch),
        deepspeed={"zero_optimization": {"stage": max(2, plan.deepspeed["zero_optimization"]["stage"])}},
        precision=plan.precision,
        device="cuda",
        gpu_kind="h200",
        capability=(9, 0),
        world=1,
        slots=1,
        checkpointed_layers=plan.checkpointed_layers,
        attention="varlen",
    )


@pytest.mark.parametrize(("name", "family", "tune", "prompts", "again", "precision", "task"), CASES)
def test_bytes_are_those_that_torch_allocates(
    name: str,
    family: str,
    tune: dict[str, Any],
    prompts: Prompts,
    again: int,
    precision: str,
    task: dict[str, Any],
    tmp_path: Path,
) -> None:
    plan = family_plan(tmp_path, family, tune=tune, **task)
    plan = replace(plan, precision=precision, checkpointed_layers=again)
    setting = setting_of(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced, load = trace(plan, setting.shape, prompts)
    found = activations(setting, load)
    kept = sum(found.kept.values())
    near = CHUNKED if setting.shape.delta else TOLERANCE
    assert kept == pytest.approx(traced.kept, rel=near)
    assert kept + found.backward == pytest.approx(traced.backward, rel=near)
    peak = max(traced.forward, traced.backward)
    assert kept + max(found.forward, found.backward) == pytest.approx(peak, rel=near)
    assert peak > traced.kept > 0, "something was kept, and came on top"


@pytest.mark.parametrize("tune", [LORA, {**LORA, "r": 40, "target_modules": r".*layers.*\.(q_proj|down_proj)"}])
def test_adapters_beside_frozen_weights_are_counted(tune: dict[str, Any], tmp_path: Path) -> None:
    plan = replace(family_plan(tmp_path, "qwen3", tune=tune), precision="bf16")
    language = backbone.language_of(backbone.core_of(make_scorer(plan).model))
    joined = fused_layer._joined_of(language)
    weights = sum(m.base.weight.numel() for j in joined for m in j.members)
    beside = sum(j.together.untyped_storage().nbytes() // j.together.itemsize for j in joined) - weights
    frozen = states(setting_of(plan)).forward["frozen weights"]
    apart = states(
        setting_of(replace(plan, config=replace(plan.config, train=replace(plan.config.train, kernels="plain"))))
    )
    assert frozen - apart.forward["frozen weights"] == 4 * beside > 0  # in float32, as its DeepSpeed has it


@pytest.mark.parametrize("pictures", [1, 3])  # tables of one size are made, or blocks are the fullest
def test_the_tower_alone_can_be_the_fullest_moment(pictures: int, tmp_path: Path) -> None:
    """A frozen tower keeps nothing, but an image of many patches passes through it while all else is small."""
    plan = replace(family_plan(tmp_path, "qwen3_vl", tune=LORA), precision="bf16", checkpointed_layers=2)
    tower = {**plan.arch["vision_config"], "hidden_size": 256, "intermediate_size": 768}  # wider than pixels
    tower["deepstack_visual_indexes"] = [0]
    model = replace(plan.config.model, max_pixels=96 * 128 * 16**2)
    plan = replace(plan, arch={**plan.arch, "vision_config": tower}, config=replace(plan.config, model=model))
    prompts = Prompts(documents=pictures, length=3100, grid=(96, 128))
    traced, load = trace(plan, setting_of(plan).shape, prompts)
    found = activations(setting_of(plan), load)
    assert traced.forward > 2 * traced.backward
    assert sum(found.kept.values()) + found.forward == pytest.approx(traced.forward, rel=TOLERANCE)


@pytest.mark.parametrize("tune", [LORA, FROZEN_TOWER])
def test_logits_take_one_block(tune: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """The fullest moment is the head's, a block of logits of some of its answers: not of them all."""
    plan = replace(family_plan(tmp_path, "qwen3", tune=tune, **SFT), precision="bf16", checkpointed_layers=2)
    plan = replace(plan, arch={**plan.arch, "vocab_size": 30_000})
    setting, prompts = setting_of(plan), replace(CHATS, answers=701)
    monkeypatch.setattr(arithmetic, "LOGIT_BYTES", 256 * 30_000 * 2)
    traced, load = trace(plan, setting.shape, prompts)
    found = activations(setting, load)
    kept = sum(found.kept.values())
    assert kept == pytest.approx(traced.kept, rel=TOLERANCE)
    assert kept + found.forward == pytest.approx(traced.forward, rel=TOLERANCE)
    assert 256 * 30_000 * 2 < found.forward < 400 * 30_000 * 2
    assert kept + found.backward == pytest.approx(traced.backward, rel=TOLERANCE)


def test_a_model_of_8b_with_its_real_sizes(tmp_path: Path) -> None:
    """36 layers, 27 vision blocks, 11,000 tokens: nothing is scaled down, and nothing is computed."""
    import yaml

    arch = yaml.safe_load((conf_dir() / "model" / "qwen3_vl_8b.yaml").read_text())["arch"]
    plan = replace(family_plan(tmp_path, "qwen3_vl", tune=LORA), arch=arch, precision="bf16", checkpointed_layers=24)
    prompts = Prompts(groups=2, prefix=200, documents=4, length=1300, grid=(56, 72))
    traced, load = trace(plan, setting_of(plan).shape, prompts)
    found = activations(setting_of(plan), load)
    kept = sum(found.kept.values())
    assert kept > 10 * 2**30
    assert kept == pytest.approx(traced.kept, rel=0.002)
    assert kept + max(found.forward, found.backward) == pytest.approx(max(traced.forward, traced.backward), rel=0.002)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"])
def test_more_to_do_is_more_to_keep(family: str, tmp_path: Path) -> None:
    """More tokens, more patches, fewer layers recomputed: never fewer bytes."""
    setting = setting_of(replace(family_plan(tmp_path, family, tune=FULL), precision="bf16"))

    def bytes_of(layers: int, tokens: int = 4000, visual: int = 256) -> tuple[int, int]:
        shared = 0 if setting.shape.delta else tokens + 1000
        load = Load(tokens=tokens, visual=visual, patches=4 * visual, key_rows=shared, documents=8)
        found = activations(replace(setting, checkpointed_layers=layers), load)
        kept = sum(found.kept.values())
        return kept, kept + max(found.forward, found.backward)

    for layers in (0, 1, 2):
        for more in (bytes_of(layers, tokens=5000), bytes_of(layers, visual=1024)):
            assert all(a > b for a, b in zip(more, bytes_of(layers), strict=True))
    for layers in (0, 1):
        (kept, peak), (kept_less, peak_less) = bytes_of(layers), bytes_of(layers + 1)
        assert kept > kept_less and peak >= peak_less


def test_every_recomputed_layer_saves_the_same(tmp_path: Path) -> None:
    """Each but the first, whose input wants no gradient where the embeddings are frozen, and the last one, half of
    which is computed for few rows."""
    plan = family_plan(tmp_path, "qwen3", tune=LORA)
    arch = {**plan.arch, "num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}
    setting = setting_of(replace(plan, arch=arch, precision="bf16"))
    load = Load(tokens=4000, documents=4)
    kept = [sum(activations(replace(setting, checkpointed_layers=n), load).kept.values()) for n in range(1, 8)]
    steps = {a - b for a, b in zip(kept, kept[1:], strict=False)}
    assert len(steps) == 1 and steps.pop() > 0
