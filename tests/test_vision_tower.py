"""The fast forward of a frozen vision tower, and kept features, against transformers' own forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from launcher.errors import ConfigError
from launcher.estimates import Load
from launcher.families import FAMILIES
from launcher.planning.hostram import host_parts
from launcher.planning.states import states
from launcher.training import processors, vision_cache
from launcher.training.batching import MicroBatch, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.vision_cache import FeatureCache
from launcher.training.vision_sight import PlainTower, Sight, attend_with
from launcher.training.vision_tower import FrozenTower, why_plain
from tests.groups import GROUPS, packed
from tests.planning_support import gpus, plan, setting_of
from tests.tiny import family_arch, tiny_plan

GRIDS = [(1, 4, 6), (1, 2, 2), (3, 8, 4), (1, 4, 6), (1, 10, 10)]  # a video among images; a window and a part of one
SEEING = [name for name, family in FAMILIES.items() if family.sees]
ATTEND = attend_with("reference")


def make_tower(family: str) -> Any:
    """A frozen tower on transformers' own attention, no weight 0 or 1."""
    made = getattr(transformers, FAMILIES[family].model_class)
    arch = {key: value for key, value in family_arch(family).items() if key != "architectures"}
    torch.manual_seed(0)
    with torch.device("meta"):
        whole = made._from_config(made.config_class(**arch), dtype=torch.float32)
    tower = type(whole.model.visual)._from_config(whole.config.vision_config, dtype=torch.float32)
    tower.requires_grad_(False).config._attn_implementation_internal = "eager"
    for parameter in tower.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return tower


def make_pixels(tower: Any, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    return torch.randn(sum(t * h * w for t, h, w in grids), tower.patch_embed.proj.weight[0].numel())


@pytest.mark.parametrize("family", SEEING)
def test_features_equal_those_of_transformers(family: str) -> None:
    tower = make_tower(family)
    assert why_plain(tower, FAMILIES[family]) is None
    pixels, fast = make_pixels(tower, GRIDS), FrozenTower(tower, ATTEND)
    wanted, wanted_deep = PlainTower(tower)(pixels, GRIDS)
    for _ in range(2):  # with tables made, and with tables kept
        got, deep = fast(pixels, GRIDS)
        assert got.abs().max() > 0.1 and not got.requires_grad
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(deep, wanted_deep, atol=1e-5, rtol=1e-5)
    assert len(deep) == len(getattr(tower, "deepstack_visual_indexes", ()))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_mergers_that_train_get_transformers_gradients(family: str) -> None:
    tower = make_tower(family)
    trained = {name: p.requires_grad_() for name, p in tower.named_parameters() if "merger" in name}
    assert why_plain(tower, FAMILIES[family]) is None
    pixels = make_pixels(tower, GRIDS)
    found = []
    for forward in (FrozenTower(tower, ATTEND), PlainTower(tower)):
        merged, deep = forward(pixels, GRIDS)
        sum((f * torch.linspace(-1, 1, f.numel()).view_as(f)).sum() for f in (merged, *deep)).backward()
        found.append({name: p.grad.clone() for name, p in trained.items()})
        tower.zero_grad()
    assert all(grad.abs().max() > 1e-3 for grad in found[1].values())
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-5)


def test_why_a_tower_is_left_to_transformers() -> None:
    tower = make_tower("qwen3_vl")
    family = FAMILIES["qwen3_vl"]
    assert why_plain(tower, family, shards="none") is None
    assert "buffers" in str(why_plain(tower, family, shards="nvme"))
    assert "no fast path" in str(why_plain(tower, FAMILIES["qwen2_5_vl"]))
    tower.blocks[1].mlp.linear_fc1.bias.requires_grad_()
    assert why_plain(tower, family) == "it trains" and "gradients" in str(why_plain(tower, family, shards="none"))
    tower.requires_grad_(False).blocks[0].attn.qkv.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    assert why_plain(tower, family) == "its linear layers are Linear4bit"


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_sharded_tower_is_one_module_that_calls_the_same_ones_each_time(family: str) -> None:
    """ZeRO-3 gathers where a module is called, and wants the same calls on every rank: one may know the sizes of its
    images already while another sees them for the first time."""
    tower, plain = make_tower(family), make_tower(family)
    sight = Sight(tower, FAMILIES[family], ATTEND, shards="none")
    assert sight._compute is tower and isinstance(tower.fused, FrozenTower)
    called: list[str] = []
    for name, module in tower.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    pixels, seen = make_pixels(tower, GRIDS), []
    for _ in range(2):  # with tables made, and with tables kept
        called.clear()
        got, deep = sight.compute(pixels, GRIDS)
        seen.append(list(called))
        wanted, wanted_deep = PlainTower(plain)(pixels, GRIDS)
        torch.testing.assert_close([got, *deep], [wanted, *wanted_deep], atol=1e-5, rtol=1e-5)
        assert not got.requires_grad
    assert seen[0] == seen[1] and seen[0][0] == "" and seen[0].count("") == 1
    assert {name.split(".")[0] for name in seen[0][1:]} <= {"merger", "deepstack_merger_list"}


@pytest.mark.parametrize(("shards", "trains"), [("nvme", ""), ("none", "merger"), ("cpu", "blocks")])
def test_a_sharded_tower_stays_as_it_is_where_gradients_or_files_need_it(shards: str, trains: str) -> None:
    tower = make_tower("qwen3_vl")
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(bool(trains) and name.startswith(trains))
    sight = Sight(tower, FAMILIES["qwen3_vl"], ATTEND, shards=shards)
    assert isinstance(sight._compute, PlainTower) and not hasattr(tower, "fused")
    assert "forward" not in vars(tower)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[MicroBatch]]:
    """A scorer with a frozen tower, and micro-batches of all groups and of each alone."""
    frozen = {"name": "full", "language": "full", "vision": "frozen", "projector": "frozen"}
    tiny = tiny_plan(tmp_path_factory.mktemp("run"), tune=frozen, memory={"vision_cache_gib": 1.0})
    processor = processors.load_processor(tiny)
    scorer = build_scorer(tiny, processor, torch.device("cpu"))
    encoder, made = make_encoder(tiny, processor), []
    for groups in (GROUPS["mixed"], *([group] for group in GROUPS["mixed"])):
        encoded = [encoder.encode(group) for group in groups]
        made.append(packed(processor, encoded, make_units(encoded, tiny.cost, 8192, splittable=False)))
    return scorer, made


def same(a: Any, b: Any) -> bool:
    return torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1])) and len(a[1]) == len(b[1]) > 0


def test_kept_features_are_those_computed_bit_for_bit(batches: tuple[Any, list[MicroBatch]]) -> None:
    scorer, (every, *alone) = batches
    sight, plain = scorer.sight, Sight(scorer.core.visual, FAMILIES["qwen3_vl"], ATTEND)
    assert len(every.media) > 2 and not any(map(scorer.knows, every.media))
    wanted = plain.see(every, always=False)
    first = sight.see(every, always=False)
    assert all(map(scorer.knows, every.media))
    # Nothing is computed again, nor are pixels needed.
    sight._compute = None
    blind = replace(every, pixel_values=None, media=dict.fromkeys(every.media, False))
    assert same(first, wanted) and same(sight.see(blind, always=False), wanted)
    seeing = [batch for batch in alone if batch.media]
    assert seeing
    for batch in seeing:
        got, computed = sight.see(batch, always=False), plain.see(batch, always=False)
        torch.testing.assert_close(got, computed, atol=1e-6, rtol=1e-5)


def test_some_images_are_kept_and_some_computed(batches: tuple[Any, list[MicroBatch]]) -> None:
    scorer, (every, *alone) = batches
    tower, family = scorer.core.visual, FAMILIES["qwen3_vl"]
    part = next(batch for batch in alone if 0 < len(batch.media) < len(every.media))
    sight = Sight(tower, family, ATTEND, FeatureCache(2**30, torch.device("cpu")))
    sight.see(part, always=False)
    seen: list[int] = []
    sight._compute = lambda pixels, grids: (seen.append(len(grids)), FrozenTower(tower, ATTEND)(pixels, grids))[1]
    got = sight.see(every, always=False)
    assert seen == [len(every.media) - len(part.media)]
    asked = len(every.media) + len(part.media)
    assert f"of {asked} that were needed, {len(part.media)} were here" in sight.cache.told()
    torch.testing.assert_close(got, Sight(tower, family, ATTEND).see(every, always=False), atol=1e-6, rtol=1e-5)
    # Every rank runs the tower under ZeRO-3, also one that has all of its images: on a blank one.
    sight.see(every, always=True)
    assert seen[1:] == [1]


def test_a_full_cache_keeps_what_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_cache, "SLAB_BYTES", 8 * 2 * 3 * 4)  # eight rows of two maps
    cache = FeatureCache(2 * vision_cache.SLAB_BYTES, torch.device("cpu"))
    features = {key: torch.randn(rows, 2, 3) for key, rows in {"a": 5, "b": 4, "c": 9, "d": 4, "e": 1}.items()}
    for key, value in features.items():
        cache.put(key, value)  # type: ignore[arg-type]
        assert ("it is full" in cache.told()) == (key not in "ab")  # not while the last slab has rows left
    kept = [key for key in features if key in cache]
    assert kept == ["a", "b", "d"]  # c is larger than a slab; e finds none
    assert cache.told().startswith("3 images in 0.00 GiB, and it is full; of 0 that were needed")
    for got, key in zip(cache.take(kept), kept, strict=True):  # type: ignore[arg-type]
        assert torch.equal(got, features[key])


def test_features_that_training_changes_are_not_kept(tmp_path: Path) -> None:
    tiny = tiny_plan(tmp_path, memory={"vision_cache_gib": 1.0})
    with pytest.raises(ConfigError, match=r"features that this run changes[^✗]*tune\.projector=frozen"):
        build_scorer(tiny, processors.load_processor(tiny), torch.device("cpu"))


def test_the_plan_counts_kept_features_and_refuses_them_where_they_change() -> None:
    kept = setting_of(plan("model=tiny", "memory.vision_cache_gib=1.5", "tune=lora"))
    assert host_parts(kept, states(kept), Load(tokens=100))["features of images"] == 1.5 * 2**30 * kept.slots
    for words, seen, fits in ((("gpus=1",), (), "6"), (("gpus=2",), (), "2.5"), (("gpus=2",), gpus(2), "1")):
        with pytest.raises(
            ConfigError, match=rf"of it (for features of|with any)[^$]*try  memory\.vision_cache_gib={fits}[ \n]"
        ):
            plan("model=tiny", "memory.vision_cache_gib=8", *words, "tune=lora", gpus=seen, ram_bytes=int(7.6 * 2**30))
        plan(
            "model=tiny", f"memory.vision_cache_gib={fits}", *words, "tune=lora", gpus=seen, ram_bytes=int(7.6 * 2**30)
        )
    with pytest.raises(ConfigError, match=r"tune\.projector=full changes it[^$]*try  tune\.projector=frozen"):
        plan("model=tiny", "memory.vision_cache_gib=1.5", "tune=lora", "tune.projector=full")
