"""Weights read straight to where they are needed are those of from_pretrained; random ones depend on names alone."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.errors import ConfigError, MachineError
from launcher.families import FAMILIES
from launcher.training import ahead, direct, layerwise, layouts, models, processors
from launcher.training.weightfiles import Part, read_parts
from launcher.weightheaders import stored_tensors
from tests.tiny import family_plan

CPU = torch.device("cpu")
STORED_AS_USED = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "qwen3", "qwen2")


def built(folder: Path, family: str) -> tuple[Any, Any, Any]:
    """A tiny model with random weights, its plan, and the plan of the folder FOLDER/m that holds it."""
    plan = family_plan(folder, family)
    processor = processors.load_processor(plan)
    model = models.load_model(plan, processors.special_ids(processor), CPU)
    model.save_pretrained(folder / "m", max_shard_size="100KB")
    layouts.publish(folder / "m", FAMILIES[family])
    local = replace(plan.config.model, path=str(folder / "m"), weights="pretrained")
    return model, plan, replace(plan, config=replace(plan.config, model=local))


@pytest.mark.parametrize("family", STORED_AS_USED)
def test_every_weight_and_buffer_is_that_of_from_pretrained(family: str, tmp_path: Path) -> None:
    kind = type(built(tmp_path, family)[0])
    if family == "qwen2_5_vl":  # published files know nothing of language_model
        for file in (tmp_path / "m").glob("*.safetensors"):
            short = {key.replace("model.visual", "visual"): value for key, value in load_file(file).items()}
            save_file({key.replace("language_model.", ""): value for key, value in short.items()}, file)
    theirs = kind.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)  # the files are float32
    found = direct.fill(direct.match(kind, tmp_path / "m", torch.bfloat16), CPU)
    ours = found.model
    weights = dict(theirs.named_parameters(remove_duplicate=False))
    own = dict(ours.named_parameters(remove_duplicate=False))
    assert list(own) == list(weights) and len(list(ours.parameters())) == len(list(theirs.parameters()))
    for key, weight in weights.items():
        assert own[key].dtype == torch.bfloat16 and own[key].requires_grad and torch.equal(own[key], weight), key
    buffers = dict(theirs.named_buffers())
    assert buffers and dict(ours.named_buffers()).keys() == buffers.keys()
    for key, buffer in ours.named_buffers():
        assert buffer.dtype == buffers[key].dtype and torch.equal(buffer, buffers[key]), key
    assert ours.config.to_dict() == theirs.config.to_dict() and ours.training == theirs.training
    assert found.read_bytes == 4 * sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_what_is_turned_on_the_way_is_left_to_transformers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, plan, local = built(tmp_path, family)
    ids = processors.special_ids(processors.load_processor(plan))
    loaded = models.load_model(local, ids, CPU, to_device=True)
    assert "weights: loaded by transformers (" in capsys.readouterr().out
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def test_files_that_do_not_fit_are_not_read(tmp_path: Path) -> None:
    model = built(tmp_path, "qwen3")[0]
    folder, whole = tmp_path / "m", {key: value.clone() for key, value in model.state_dict().items()}
    for file in folder.glob("model*"):
        file.unlink()
    name = "model.layers.0.mlp.up_proj.weight"

    def refused(weights: dict[str, torch.Tensor], **config: Any) -> str:
        save_file(weights, folder / "model.safetensors")
        text = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(text))
        with pytest.raises(direct.NotDirect) as caught:
            direct.match(type(model), folder, torch.float32)
        return str(caught.value)

    assert refused({key: value for key, value in whole.items() if key != name}) == f"{name} is missing"
    assert refused(whole | {"model.more": torch.zeros(2)}) == "model.more has no place in the model"
    assert refused(whole | {name: torch.zeros(3, 3)}) == f"{name} is stored as (3, 3), not (96, 64)"
    assert "is I64" in refused(whole | {name: torch.zeros(96, 64, dtype=torch.int64)})
    assert "stored twice" in refused(whole, tie_word_embeddings=True)
    assert "quantized" in refused(whole, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(direct.NotDirect, match="is no folder"):
        direct.match(type(model), tmp_path / "none", torch.float32)


@pytest.mark.parametrize("to_device", [True, False])
def test_a_damaged_file_is_named(to_device: bool, tmp_path: Path) -> None:
    _, plan, local = built(tmp_path, "qwen3")
    ids = processors.special_ids(processors.load_processor(plan))
    file = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    whole = file.read_bytes()
    integers = whole.replace(b'"F32"', b'"I32"', 1)
    for content in (whole[:-8], whole[:100], b"version https://git-lfs", b"", whole[:8] + b"x" + whole[9:], integers):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{re.escape(str(file))} is (cut short|damaged)[^$]*again"):
            models.load_model(local, ids, CPU, to_device=to_device)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=rf"{re.escape(str(file))} is a folder"):
        models.load_model(local, ids, CPU, to_device=to_device)
    file.rmdir()
    file.write_bytes(whole)
    models.load_model(local, ids, CPU, to_device=to_device)


def test_ranks_read_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 cannot read directly; then has other files, or the same tensors behind a longer header."""
    model, plan, local = built(tmp_path, "qwen3")
    ids = processors.special_ids(processors.load_processor(plan))
    models.load_model(local, ids, CPU, to_device=True, gather=lambda own: [own, ("b", {}, "quantized")])
    assert "loaded by transformers (rank 1 on b says: quantized)" in capsys.readouterr().out
    models.load_model(local, ids, CPU, to_device=True, gather=lambda own: [own, ("b", *own[1:])])
    assert "read straight to cpu" in capsys.readouterr().out
    first = min(file.name for file in (tmp_path / "m").glob("*.safetensors"))
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "m", other)
    save_file(load_file(other / first), other / first, metadata={"format": "pt", "by": "another program"})
    one, two = (direct.match(type(model), folder, torch.float32).digests() for folder in (tmp_path / "m", other))
    assert (other / first).stat().st_size > (tmp_path / "m" / first).stat().st_size and one == two
    with pytest.raises(MachineError, match=rf"rank 1 on b are not those of rank 0 on [^:]*: {first} differs"):
        models.load_model(
            local, ids, CPU, to_device=True, gather=lambda own: [own, ("b", own[1] | {first: "other"}, "")]
        )


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shards_of_all_ranks_are_the_whole(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DeepSpeed's rule for a shard's size: the number of elements rounded up to whole shards."""
    kind = type(built(tmp_path, "qwen2_5_vl")[0])
    theirs, read = dict(kind.from_pretrained(tmp_path / "m", dtype=torch.float32).named_parameters()), 0
    shards: dict[str, list[torch.Tensor]] = {name: [] for name in theirs}
    for rank in range(world):

        def shard(parameter: Any, rank: int = rank) -> None:
            size = -(-parameter.numel() // world)
            parameter.ds_tensor = torch.zeros(size)
            parameter.ds_tensor.ds_numel = size
            parameter.ds_zero_partition_rank, parameter.ds_secondary_tensor = rank, None

        monkeypatch.setattr(direct, "sharder", lambda config, shard=shard: shard)
        sharded = {"zero_optimization": {}}
        matched = direct.match(kind, tmp_path / "m", torch.float32, deepspeed=sharded)
        found = direct.fill(matched, CPU, deepspeed=sharded)
        read += found.read_bytes
        for name, parameter in found.model.named_parameters():
            shards[name].append(parameter.ds_tensor)
    for name, weight in theirs.items():
        assert torch.equal(torch.cat(shards[name])[: weight.numel()], weight.flatten()), name
    assert read == 4 * sum(weight.numel() for weight in theirs.values())  # each byte on one rank


def test_any_part_of_a_file_is_read_from_any_beginning(tmp_path: Path) -> None:
    made = {"a": torch.randn(3000, 3001, dtype=torch.bfloat16), "b": torch.randn(()), "none": torch.zeros(0, 2)}
    save_file(made, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    for turn in (0.0, 0.5, 0.99):
        into = {name: torch.full_like(value, 7) for name, value in made.items()}
        parts = [Part(stored=stored[name], first=0, target=value.view(-1)) for name, value in into.items()]
        assert read_parts(parts, turn=turn) == 2 * 3000 * 3001 + 4
        assert all(torch.equal(into[name], value) for name, value in made.items())
    some = torch.empty(500)
    read_parts([Part(stored=stored["a"], first=1234, target=some)])
    assert torch.equal(some, made["a"].flatten()[1234:1734].float())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(OSError, match="ends early"):
        read_parts([Part(stored=stored["a"], first=0, target=torch.empty(5000))])


def test_the_ranks_of_a_host_bring_every_byte_into_memory_once(tmp_path: Path) -> None:
    files = []
    for number, size in enumerate((3 * ahead.CHUNK + 5, 7, 0, 2 * ahead.CHUNK)):
        files.append(tmp_path / f"{number}.safetensors")
        with open(files[-1], "wb") as file:
            file.truncate(size)
    shares = [list(ahead.chunks(files, rank, 3)) for rank in range(3)]
    together = sorted(chunk for share in shares for chunk in share)
    assert together == list(ahead.chunks(files, 0, 1)) and {len(share) for share in shares} == {2, 3}
    ahead.read(shares[0])
    assert ahead.read(shares[0]) == 0  # all of it is there
    assert ahead.read([(tmp_path / "gone", 0)]) == 0
    plan = family_plan(tmp_path, "qwen3")
    assert ahead.start_reading(plan, 0, 1) is None
    local = replace(plan.config.model, path=str(tmp_path), weights="pretrained")
    plan = replace(plan, config=replace(plan.config, model=local), hosts=plan.hosts * 2)
    thread = ahead.start_reading(plan, 0, 1)
    assert thread is not None
    thread.join()
    sharded = replace(plan, deepspeed={"zero_optimization": {"stage": 3}})
    assert ahead.start_reading(sharded, 0, 1) is None  # each host reads its shards and no more
    (tmp_path / "lost.safetensors").symlink_to(tmp_path / "gone")
    assert ahead.start_reading(plan, 0, 1) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_a_large_model_are_as_transformers_draws_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = family_plan(tmp_path, family)
    ids = processors.special_ids(processors.load_processor(plan))
    usual = models.load_model(plan, ids, CPU)
    monkeypatch.setattr(layerwise, "MOST_WHOLE", 0)
    large, again = (dict(models.load_model(plan, ids, CPU).named_parameters()) for _ in range(2))
    other = replace(plan, config=replace(plan.config, train=replace(plan.config.train, seed=8)))
    different = dict(models.load_model(other, ids, CPU).named_parameters())
    assert list(large) == [name for name, _ in usual.named_parameters()]
    drawn = []
    for name, weight in usual.named_parameters():
        assert torch.equal(large[name], again[name])
        if weight.ndim > 1 and weight.std() > 0 and weight.numel() > 500:
            assert abs(large[name].std() / weight.std() - 1) < 0.2 and abs(large[name].mean()) < 0.2 * weight.std(), (
                name
            )
            assert not torch.equal(large[name], different[name])
            drawn.append(large[name].flatten()[:500])
        elif weight.std() == 0:
            assert torch.equal(large[name], weight), name
    assert len({tuple(first.tolist()) for first in drawn}) == len(drawn) > 5  # no two modules are alike
