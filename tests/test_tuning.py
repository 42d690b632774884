"""What a tuning choice trains, and that everything else stays as it was, byte for byte."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.errors import ConfigError
from launcher.families import FAMILIES
from launcher.planning.models import trainable_counts
from launcher.planning.shapes import read_shape
from launcher.spec import OptimConfig
from launcher.training import processors
from launcher.training.batching import collate, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.pixels import Pixels
from launcher.training.tuning import parameter_groups, part_of, trainable_by_part
from tests.groups import GROUPS
from tests.tiny import tiny_plan

LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen"}
CHOICES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "full": ({}, {"language", "embeddings", "vision", "projector"}),
    "lora": (LORA, {"language"}),
    "lora everywhere": ({**LORA, "vision": "lora", "projector": "lora"}, {"language", "vision", "projector"}),
    "projector": ({"language": "frozen", "vision": "frozen"}, {"projector"}),
    "head": ({"language": "frozen", "vision": "frozen", "projector": "frozen", "head": "full"}, {"head"}),
}


def digests(scorer: Any) -> dict[str, str]:
    return {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in scorer.named_parameters()}


@pytest.mark.parametrize("name", CHOICES)
def test_one_step_moves_what_trains_and_nothing_else(name: str, tmp_path: Path) -> None:
    tune, parts = CHOICES[name]
    plan = tiny_plan(tmp_path, tune=tune)
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    assert set(trainable_by_part(scorer, FAMILIES["qwen3_vl"])) == parts
    encoder, pixels = make_encoder(plan, processor), Pixels(processor)
    encoded = [encoder.encode(g) for g in GROUPS["mixed"]]
    needed = {s.key: pixels.rows(s) for e in encoded for p in e.prompts for s in p.media}
    batch = collate(encoded, make_units(encoded, plan.cost, 8192, splittable=False), needed, padded=True)
    before = digests(scorer)
    trainable = {n for n, p in scorer.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in scorer.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):  # a LoRA A has no gradient while its B is zero
        (scorer(batch) * (batch.labels - 0.4)).sum().backward()
        optimizer.step()
    moved = {n for n, digest in digests(scorer).items() if digest != before[n]}
    assert moved <= trainable
    still = trainable - moved
    assert not still, f"no gradient reached {sorted(still)[:5]}"


def test_adapters_begin_equal_whatever_ran_before(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, tune=LORA)
    processor = processors.load_processor(plan)
    first = digests(build_scorer(plan, processor, torch.device("cpu")))
    torch.rand(3)
    assert digests(build_scorer(plan, processor, torch.device("cpu"))) == first


def test_buffers_and_scores_stay_float32_in_bf16(tmp_path: Path) -> None:
    import dataclasses

    plan = dataclasses.replace(tiny_plan(tmp_path, tune=LORA), precision="bf16")
    scorer = build_scorer(plan, processors.load_processor(plan), torch.device("cpu"))
    assert {p.dtype for p in scorer.parameters()} == {torch.bfloat16}
    assert scorer.head.delta.dtype == torch.float32
    assert all(b.dtype == torch.float32 for n, b in scorer.named_buffers() if "inv_freq" in n)


def scorer_of(tmp_path: Path, **config: Any) -> Any:
    plan = tiny_plan(tmp_path, **config)
    return build_scorer(plan, processors.load_processor(plan), torch.device("cpu"))


def trained(scorer: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in scorer.named_parameters() if p.requires_grad}


def test_one_group_for_each_rate_and_embeddings_go_with_the_language_model(tmp_path: Path) -> None:
    optim = OptimConfig(lr_language=1e-5, lr_vision=2e-6, lr_head=1e-5)
    scorer = scorer_of(tmp_path, tune={"head": "full"})
    groups = parameter_groups(scorer, FAMILIES["qwen3_vl"], optim, 1e-4)
    names = {id(p): name for name, p in scorer.named_parameters()}
    found = {group["peak"]: {part_of(names[id(p)], FAMILIES["qwen3_vl"]) for p in group["params"]} for group in groups}
    assert found == {1e-5: {"language", "embeddings", "head"}, 2e-6: {"vision"}, 1e-4: {"projector"}}
    assert sum(len(group["params"]) for group in groups) == len(trained(scorer))
    assert len(parameter_groups(scorer, FAMILIES["qwen3_vl"], OptimConfig(lr_vision=1e-4), 1e-4)) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as peft writes it, none of whose matrices is zero."""
    folder = tmp_path_factory.mktemp("adapter")
    scorer = scorer_of(folder, tune={**LORA, "projector": "lora", "use_dora": True})
    with torch.no_grad():
        for parameter in trained(scorer).values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    scorer.model.save_pretrained(folder)
    save_file({name: p.detach() for name, p in trained(scorer).items()}, folder / "live.safetensors")
    return folder


DORA = {**LORA, "projector": "lora", "use_dora": True}


@pytest.mark.parametrize("older", [False, True])
def test_a_run_begins_with_a_given_adapter(tmp_path: Path, folder: Path, older: bool) -> None:
    """Also with one of a version whose names had no language_model in them."""
    if older:
        names = load_file(folder / "adapter_model.safetensors")
        renamed = {
            n.replace("model.language_model.", "model.").replace("model.visual", "visual"): t for n, t in names.items()
        }
        assert len(renamed.keys() - names.keys()) == len(names)
        save_file(renamed, tmp_path / "adapter_model.safetensors")
        shutil.copy(folder / "adapter_config.json", tmp_path)
        folder, live = tmp_path, load_file(folder / "live.safetensors")
    else:
        live = load_file(folder / "live.safetensors")
    begun = trained(scorer_of(tmp_path, tune=DORA, model={"adapter": str(folder)}))
    assert begun.keys() == live.keys()
    assert all(torch.equal(begun[name], live[name]) for name in live)


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ({"r": 4, "use_dora": False}, ["r is 8 there, and tune.r=4", "try  tune.r=8", "try  tune.use_dora=true"]),
        ({"use_rslora": True}, ["use_rslora is false there", "try  tune.use_rslora=false"]),
        ({"projector": "frozen"}, ["18 adapter tensors there have no place", "try  tune.projector=lora"]),
        ({"vision": "lora"}, ["adapter tensors of this run are not there", "try  tune.vision=frozen"]),
        ({"target_modules": "qwen"}, ["o_proj", "try  tune.target_modules=null"]),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, folder: Path, tune: Any, words: list[str]) -> None:
    """Z17."""
    with pytest.raises(ConfigError) as caught:
        scorer_of(tmp_path, tune={**DORA, **tune}, model={"adapter": str(folder)})
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_adapter_of_another_kind_or_none_is_refused(tmp_path: Path) -> None:
    for text, words in (("{", "cannot be read"), ('{"peft_type": "IA3"}', "peft_type is IA3")):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            scorer_of(tmp_path, tune=LORA, model={"adapter": str(tmp_path)})


@pytest.mark.parametrize("name", ["lora", "dora", "rslora", "vision too", "qwen"])
def test_the_plan_counts_what_trains(name: str, tmp_path: Path) -> None:
    choices = {"dora": {"use_dora": True}, "rslora": {"use_rslora": True}, "vision too": {"vision": "lora"}}
    tune = {**LORA, **choices.get(name, {}), "target_modules": "qwen" if name == "qwen" else None}
    plan = tiny_plan(tmp_path, tune=tune)
    counts = trainable_counts(read_shape(plan.config.model, plan.arch), plan.config.tune)
    found = trainable_by_part(scorer_of(tmp_path, tune=tune), FAMILIES["qwen3_vl"])
    assert found == {part: count for part, count in counts.items() if count}
