"""tune=qlora: four bits where they belong, the same from random weights and from files, and adapters that learn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import nn

from launcher.errors import ConfigError
from launcher.families import FAMILIES
from launcher.training import processors, quantize
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.pixels import Pixels
from launcher.training.steps import StepMaker
from launcher.training.tuning import checkpoint_layers
from tests.groups import GROUPS
from tests.planning_support import gpus, plan
from tests.tiny import tiny_plan

FAMILY = FAMILIES["qwen3_vl"]
QLORA = {"name": "qlora", "language": "lora", "vision": "frozen", "projector": "frozen"}


def built(tmp_path: Path, **config: Any) -> tuple[Any, Any]:
    made = tiny_plan(tmp_path, **config)
    processor = processors.load_processor(made)
    return build_scorer(made, processor, torch.device("cpu")), (made, processor)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of an unquantised model, and its weights by the names they have in the wrapped one."""
    folder = tmp_path_factory.mktemp("base")
    scorer, (_, processor) = built(folder)
    for part in (scorer.model, processor):
        part.save_pretrained(folder)
    return folder, {name: p.detach().clone() for name, p in scorer.model.named_parameters()}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built(tmp_path_factory.mktemp("run"), tune=QLORA)


def weights_of(scorer: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, module in scorer.model.get_base_model().named_modules():
        if isinstance(module, Linear4bit):
            weight = module.weight
            found[name.removesuffix(".base_layer")] = dequantize_4bit(weight.data, weight.quant_state)
    return found


def test_the_language_models_linears_have_4_bits_and_nothing_else(quantized: Any, base: Any) -> None:
    scorer, _ = quantized
    four, whole = weights_of(scorer), base[1]
    found = {name for name in whole if name.endswith("_proj.weight") and FAMILY.part_of(name) == "language"}
    linears = {name.removesuffix(".weight") for name in found}
    assert four.keys() == linears and len(linears) == 4 * 7
    for name, weight in four.items():
        error = (weight - whole[f"{name}.weight"]).abs().mean() / whole[f"{name}.weight"].abs().mean()
        assert 0.02 < error < 0.15, name  # NF4's rounding, no more and no less
    for name, parameter in scorer.model.get_base_model().named_parameters():
        if ".lora_" not in name and "base_layer" not in name:
            assert torch.equal(parameter, whole[name]), name


def test_weights_from_files_come_out_the_same(tmp_path: Path, quantized: Any, base: Any) -> None:
    model = {"weights": "pretrained", "path": str(base[0])}
    loaded = weights_of(built(tmp_path, tune=QLORA, model=model)[0])
    assert all(torch.equal(weight, loaded[name]) for name, weight in weights_of(quantized[0]).items())


def test_bits_in_the_wrong_place_are_noticed(base: Any, tmp_path: Path) -> None:
    """Z16."""
    scorer, (made, _) = built(tmp_path)
    model = scorer.model
    with pytest.raises(RuntimeError, match="4 bits did not come where they belong"):
        quantize.check_quantized(model, FAMILY)
    quantize.quantize_language(model, FAMILY, made.config.tune, torch.float32)
    quantize.check_quantized(model, FAMILY)
    model.model.visual.merger.linear_fc1 = Linear4bit(4, 4)
    with pytest.raises(RuntimeError, match=r"model\.visual\.merger\.linear_fc1 \(1 layers differ\)"):
        quantize.check_quantized(model, FAMILY)


def test_adapters_get_the_gradients_of_the_dequantised_model(quantized: Any) -> None:
    scorer, (made, processor) = quantized
    plain = copy.deepcopy(scorer)
    for name, module in list(plain.named_modules()):
        if isinstance(module, Linear4bit):
            linear = nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight = nn.Parameter(dequantize_4bit(module.weight.data, module.weight.quant_state), False)
            plain.set_submodule(name, linear)
    maker = StepMaker(made, make_encoder(made, processor), Pixels(processor), rank=0, padded=True, warn=print)
    (batch,) = list(maker.training(GROUPS["text"][:1]).micro_batches)
    checkpoint_layers(scorer.core, 4)
    gradients = []
    for one in (scorer.train(), plain.train()):
        one.zero_grad(set_to_none=True)
        (one(batch) * (batch.labels - 0.4)).sum().backward()
        gradients.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    ours, theirs = gradients
    assert len(ours) == 4 * 7 * 2 and ours.keys() == theirs.keys()
    assert any(bool(value.any()) for value in theirs.values())
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-3)


def test_the_plan_counts_4_bits_and_refuses_stage_3() -> None:
    """Z09."""
    words = ("model=qwen3_vl_8b", "dataset.train=/t.jsonl", "gpus=1")
    whole, four = (plan(*words, f"tune={name}", gpus=gpus(1)) for name in ("lora", "qlora"))
    saved = whole.memory["frozen weights"] - four.memory["frozen weights"]
    linears = 36 * (4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    # Weights that are not 4 bits have copies of their adapters beside them: (outputs, inputs, ranks of 8 joined;
    # a row with both is of whole 128 bytes).
    joined = ((6144, 4096, 32, 4160), (4096, 4096, 16, 4160), (24576, 4096, 16, 4160), (4096, 12288, 16, 12352))
    copies = 36 * 2 * sum((outputs + rank) * row - outputs * inputs for outputs, inputs, rank, row in joined)
    assert saved == pytest.approx(copies + linears * (2 - 0.5 - 1 / 64 - 4 / (64 * 256)), rel=1e-6)
    assert whole.trainable == four.trainable
    with pytest.raises(ConfigError, match=r"not sharded(.|\n)*try  zero=stage2") as caught:
        plan(*words, "tune=qlora", "zero=stage3", "optim=adamw8bit", gpus=gpus(1))
    assert len(caught.value.problems) == 1
    with pytest.raises(ConfigError, match=r"weights of 4 bits cannot train"):
        plan(*words, "tune=qlora", "tune.language=full", gpus=gpus(1))
    with pytest.raises(ConfigError, match=r"use_dora=true needs whole weight matrices"):
        plan(*words, "tune=lora", "tune.use_dora=true", "zero=stage3", gpus=gpus(1))
