"""Sizes and counts of models: exactly those of transformers and peft."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from launcher.errors import ConfigError
from launcher.families import FAMILIES, LORA_PARTS, PARTS, Family
from launcher.planning.models import (
    check_targets,
    largest_adapter,
    linear_modules,
    lora_modules,
    parameter_counts,
    remarks,
    trainable_counts,
)
from launcher.planning.shapes import Shape, read_shape
from launcher.planning.speed import cost_model
from launcher.resources import conf_dir
from launcher.spec import ModelConfig, RunConfig, TuneConfig

FAMILY = FAMILIES["qwen3_vl"]
# Published totals (model cards), so that table and transformers cannot be wrong together.
TOTALS = {
    "tiny": None,  # tuned freely
    "qwen3_vl_2b": 2_127_532_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
    "qwen3_vl_30b_a3b": 31_070_754_032,
    "qwen3_vl_235b_a22b": 235_670_022_896,
    "qwen2_5_vl_3b": 3_754_622_976,
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen2_5_vl_32b": 33_452_718_336,
    "qwen2_5_vl_72b": 73_410_777_344,
    "qwen3_reranker_0_6b": 595_776_512,
    "qwen3_reranker_4b": 4_021_784_576,
    "qwen3_reranker_8b": 8_188_548_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_5_4b": 4_539_265_536,
    "qwen3_5_9b": 9_409_813_744,
    "qwen3_5_27b": 27_356_728_560,
    "qwen3_5_35b_a3b": 35_107_181_936,
}
# Parameters of adapters of rank 1 on every linear layer of the language model (closed form; experts are none).
RANK_ONE = {
    "qwen2_5_vl_7b": 2_523_136,
    "qwen3_vl_30b_a3b": 835_584,
    "qwen3_reranker_0_6b": 630_784,
    "qwen2_5_72b": 13_158_400,
    "qwen3_5_9b": 2_704_896,
}


def arch_of(name: str) -> dict[str, Any]:
    """`arch` of a model file."""
    arch: dict[str, Any] = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())["arch"]
    return arch


def shape_of(name: str) -> Shape:
    """Sizes of a shipped model."""
    return read_shape(ModelConfig(name=name, family="auto"), arch_of(name))


def meta_model(name: str) -> Any:
    """The model as transformers builds it, without memory."""
    import torch
    import transformers

    model_class = getattr(transformers, shape_of(name).family.model_class)
    with torch.device("meta"):
        return model_class(model_class.config_class(**arch_of(name)))


def by_part(parameters: Any, family: Family = FAMILY) -> dict[str, int]:
    """Numbers of parameters by part, of (name, parameter) pairs."""
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in parameters:
        counts[family.part_of(name)] += parameter.numel()
    return counts


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_and_linear_modules_are_those_of_transformers(name: str) -> None:
    import torch

    model, shape = meta_model(name), shape_of(name)
    assert parameter_counts(shape) == by_part(model.named_parameters(), shape.family)
    assert TOTALS[name] in (None, sum(parameter_counts(shape).values()))
    theirs = {
        module_name: (module.in_features, module.out_features)
        for module_name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert linear_modules(shape) == theirs
    every = dict.fromkeys((part for part in LORA_PARTS if part in shape.family.lora), "lora")
    assert set(lora_modules(shape, TuneConfig(name="lora", **every))) == theirs.keys() - {"lm_head"}
    # The tower's own names never match the language model's expression, whatever the family.
    assert all(shape.family.part_of(n) == "language" for n in lora_modules(shape, TuneConfig(name="lora")))


def test_every_shipped_model_is_counted() -> None:
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (conf_dir() / "model").glob("*.yaml")}
    assert {name for name, keys in files.items() if keys.get("arch")} == set(TOTALS)  # others build on one of these
    families = {shape_of(name).family.model_type for name in TOTALS}
    assert families == {family.model_type for family in FAMILIES.values()}


@pytest.mark.parametrize(
    "tune",
    [
        TuneConfig(name="lora", r=4),
        TuneConfig(name="lora", vision="lora", projector="lora"),
        TuneConfig(name="lora", language="frozen", projector="lora"),
        TuneConfig(name="lora", target_modules=r".*layers\.[01]\.self_attn\.(q|v)_proj"),
    ],
    ids=["language", "all parts", "projector", "own expression"],
)
def test_adapters_are_those_of_peft(tune: TuneConfig) -> None:
    from peft import LoraConfig, get_peft_model

    from launcher.families import lora_pattern

    shape = shape_of("tiny")
    pattern = lora_pattern(FAMILY, tune)
    model = get_peft_model(meta_model("tiny"), LoraConfig(r=tune.r, target_modules=pattern))
    adapters = [(n.removeprefix("base_model.model."), p) for n, p in model.named_parameters() if "lora_" in n]
    assert trainable_counts(shape, tune) == by_part(adapters)
    assert sum(trainable_counts(shape, tune).values()) > 0
    assert largest_adapter(shape, tune) == max(p.numel() for _, p in adapters)


def test_adapters_of_the_published_recipe() -> None:
    assert trainable_counts(shape_of("qwen3_vl_8b"), TuneConfig(name="lora"))["language"] == 8 * 2_727_936


@pytest.mark.parametrize("name", RANK_ONE)
def test_adapters_on_every_linear_layer_of_the_language_model(name: str) -> None:
    for target in (None, "all-linear"):
        tune = TuneConfig(name="lora", r=1, target_modules=target)
        assert trainable_counts(shape_of(name), tune)["language"] == RANK_ONE[name]


@pytest.mark.parametrize("name", ["qwen3_vl_8b", "qwen2_5_vl_7b", "qwen3_reranker_4b"])
def test_the_published_targets_leave_out_the_output_projection(name: str) -> None:
    shape = shape_of(name)
    tune = TuneConfig(name="lora", target_modules="qwen")
    suffixes = {module.rsplit(".", 1)[-1] for module in lora_modules(shape, tune)}
    assert suffixes == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    assert {shape.family.part_of(module) for module in lora_modules(shape, tune)} == {"language"}
    assert check_targets(shape, tune) == []


def test_a_model_without_a_tower_has_nothing_to_adapt_there() -> None:
    problems = check_targets(shape_of("qwen3_8b"), TuneConfig(name="lora", vision="lora"))
    assert [p.text for p in problems] == ["the model reads text only: it has no vision, and tune.vision=lora"]
    counts = trainable_counts(shape_of("qwen3_8b"), TuneConfig(name="full", language="full", projector="full"))
    assert counts["projector"] == counts["vision"] == 0


def test_the_plan_says_what_a_family_does_otherwise() -> None:
    config = RunConfig(tune=TuneConfig(name="lora"))
    said = {name: list(remarks(shape_of(name), config)) for name in TOTALS}
    silent = {name for name, texts in said.items() if not texts}
    assert silent == {name for name in TOTALS if "_a" not in name and "3_5" not in name}
    (experts,) = said["qwen3_vl_30b_a3b"]
    assert "adapts no expert" in experts and "97 % of the language model" in experts
    assert "no shared prefix" in said["qwen3_5_9b"][0]
    full = RunConfig(tune=TuneConfig(name="full", language="full"))
    assert list(remarks(shape_of("qwen3_vl_30b_a3b"), full)) == []


def test_what_full_tuning_trains() -> None:
    shape = shape_of("tiny")
    counts = parameter_counts(shape)
    full = TuneConfig(name="full", language="full", projector="full", head="full")
    assert trainable_counts(shape, full) == {**counts, "vision": 0, "head": 2 * shape.hidden}
    assert largest_adapter(shape, full) == 0


@pytest.mark.parametrize(
    ("tune", "text"),
    [
        ({"target_modules": ".*no_such"}, "matches no module of language"),
        ({"target_modules": "q_proj"}, "it must match a whole name such as model.language_model.layers.0"),
        ({"target_modules": r".*(q_proj|blocks\.0\.attn\.qkv)"}, "matches 1 modules of vision"),
        ({"target_modules": r".*(q_proj|merger\.linear_fc1)"}, "matches 1 modules of projector"),
        ({"target_modules": r".*(q_proj|lm_head)"}, "lm_head, which is never adapted"),
        ({"target_modules": ".*q_proj", "vision": "lora"}, "matches no module of vision"),
    ],
)
def test_target_modules_that_miss_or_reach_too_far(tune: dict[str, Any], text: str) -> None:
    """Z13."""
    problems = check_targets(shape_of("tiny"), TuneConfig(name="lora", **tune))
    assert text in problems[0].text
    assert problems[0].tries


def test_default_expressions_keep_to_their_part() -> None:
    """Z13: the tower trains on request only."""
    shape = shape_of("tiny")
    for part in LORA_PARTS:
        tune = TuneConfig(name="lora", **{**dict.fromkeys(LORA_PARTS, "frozen"), part: "lora"})
        matched = lora_modules(shape, tune)
        everything = [n for n in linear_modules(shape) if FAMILY.part_of(n) == part]
        assert matched == everything


def test_odd_configurations_name_the_key() -> None:
    arch = arch_of("tiny")
    text, vision = arch["text_config"], arch["vision_config"]
    broken = {**arch, "text_config": {**text, "head_dim": "32", "vocab_size": None}}
    with pytest.raises(ConfigError) as caught:
        read_shape(ModelConfig(name="x", family="qwen3_vl", path="/m"), broken)
    assert [p.text.split(" ")[0] for p in caught.value.problems] == ["text_config.head_dim", "text_config.vocab_size"]
    assert caught.value.problems[0].where == "/m/config.json"
    for change, said in (
        ({"deepstack_visual_indexes": [vision["depth"]]}, "must lie below depth"),
        ({"out_hidden_size": 7}, "out_hidden_size is 7, but must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_shape(ModelConfig(name="x", family="qwen3_vl"), {**arch, "vision_config": {**vision, **change}})
    with pytest.raises(ConfigError, match="model_type is llama, and the families known here are qwen3_vl, "):
        read_shape(ModelConfig(name="x", family="auto"), {"model_type": "llama"})
    with pytest.raises(ConfigError, match="sliding window is not trained"):
        read_shape(ModelConfig(name="x", family="auto"), {**arch_of("qwen2_5_72b"), "use_sliding_window": True})
    moe = arch_of("qwen3_vl_30b_a3b")
    dense = {**moe, "text_config": {**moe["text_config"], "mlp_only_layers": [0]}}
    with pytest.raises(ConfigError, match="text_config.mlp_only_layers"):
        read_shape(ModelConfig(name="x", family="auto"), dense)
    with pytest.raises(ConfigError, match="model_type is llama, but model.family=qwen3_vl needs qwen3_vl"):
        read_shape(ModelConfig(name="x", family="qwen3_vl"), {"model_type": "llama"})


def test_published_files_with_text_numbers_at_the_top_are_read() -> None:
    """As Qwen2.5-VL's own config.json has them."""
    arch = arch_of("qwen2_5_vl_7b")
    flat = {**arch["text_config"], **{k: v for k, v in arch.items() if k != "text_config"}}
    assert read_shape(ModelConfig(name="x", family="auto"), flat) == shape_of("qwen2_5_vl_7b")


def test_cost_counts_the_experts_of_a_token_and_the_windows_of_a_tower() -> None:
    shape = shape_of("qwen3_vl_30b_a3b")
    every_expert = 2 * (parameter_counts(shape)["language"])
    assert cost_model(shape).token < every_expert / 8
    assert 2e9 < cost_model(shape).token / 2 < 3.4e9  # A3B, its vocabulary aside
    windows = shape_of("qwen2_5_vl_7b")
    assert cost_model(windows).patch_pair == 4 * 1280 * 4  # four blocks see a whole image
    text = cost_model(shape_of("qwen3_8b"))
    assert (text.patch, text.patch_pair) == (0, 0)
    assert cost_model(shape_of("qwen3_5_4b")).token_pair == 4 * 16 * 256 * 8  # every fourth layer attends


def test_cost_of_a_token_is_its_matrix_products() -> None:
    import torch

    shape = shape_of("tiny")
    layers = [
        p.numel()
        for n, m in meta_model("tiny").named_modules()
        if isinstance(m, torch.nn.Linear) and FAMILY.part_of(n) == "language"
        for p in [m.weight]
    ]
    assert cost_model(shape).token == 2 * sum(layers)
    # Two products of every query head, two FLOPs each, in every layer.
    assert cost_model(shape).token_pair == 4 * shape.heads * shape.head_dim * shape.layers
