"""Sizes and counts of models: exactly those of transformers and peft."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from launcher.errors import ConfigError
from launcher.families import FAMILIES, LORA_PARTS
from launcher.planning.models import (
    Shape,
    check_targets,
    largest_adapter,
    linear_modules,
    lora_modules,
    parameter_counts,
    read_shape,
    trainable_counts,
)
from launcher.planning.speed import cost_model
from launcher.resources import conf_dir
from launcher.spec import ModelConfig, TuneConfig

FAMILY = FAMILIES["qwen3_vl"]
# Published totals (model cards), so that table and transformers cannot be wrong together.
TOTALS = {
    "tiny": None,  # tuned freely
    "qwen3_vl_2b": 2_127_532_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
}


def arch_of(name: str) -> dict[str, Any]:
    """`arch` of a model file."""
    arch: dict[str, Any] = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())["arch"]
    return arch


def shape_of(name: str) -> Shape:
    """Sizes of a shipped model."""
    return read_shape(ModelConfig(name=name, family="qwen3_vl"), arch_of(name))


def meta_model(name: str) -> Any:
    """The model as transformers builds it, without memory."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**arch_of(name)))


def by_part(parameters: Any) -> dict[str, int]:
    """Numbers of parameters by part, of (name, parameter) pairs."""
    counts = dict.fromkeys(("language", "embeddings", "head", "vision", "projector"), 0)
    for name, parameter in parameters:
        counts[FAMILY.part_of(name)] += parameter.numel()
    return counts


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_and_linear_modules_are_those_of_transformers(name: str) -> None:
    import torch

    model, shape = meta_model(name), shape_of(name)
    assert parameter_counts(shape) == by_part(model.named_parameters())
    assert TOTALS[name] in (None, sum(parameter_counts(shape).values()))
    theirs = {
        module_name: (module.in_features, module.out_features)
        for module_name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert linear_modules(shape) == theirs


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
    problems = check_targets(shape_of("tiny"), TuneConfig(name="lora", **tune))
    assert text in problems[0].text
    assert problems[0].tries


def test_default_expressions_keep_to_their_part() -> None:
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
    with pytest.raises(ConfigError, match="model_type is llama, but model.family=qwen3_vl needs qwen3_vl"):
        read_shape(ModelConfig(name="x", family="qwen3_vl"), {"model_type": "llama"})


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
