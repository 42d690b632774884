"""Every shipped model, tuning, ZeRO setting and number of GPUs has a plan that fits and says so, or an error that says
what would."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from launcher.errors import ConfigError
from launcher.plain import from_data
from launcher.planning import scaling
from launcher.planning.candidates import Ask, Scales, finished, needed_tokens
from launcher.planning.plan import make_plan
from launcher.planning.room import room_of
from launcher.planning.shapes import Shape, read_shape
from launcher.resources import conf_dir
from launcher.running.facts import zero_files
from launcher.spec import ModelConfig, RunConfig, RunPlan, TuneConfig, ZeroConfig
from tests.planning_support import GIB, NOW, compose, known

MODELS = sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml") if path.stem != "local")
TUNES = ("lora", "full", "qlora")
ZEROS = ("stage0", "stage1", "stage2", "stage3", "stage3_hpz", "stage2_offload", "stage3_offload", "auto")
COUNTS = (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64)
PER_HOST = 8
GPU_BYTES = 140 * GIB  # cluster.gpu=h200
ROWS = ("dataset=jsonl", "dataset.train=/data/train.jsonl", "cluster.gpu=h200")


@functools.cache
def option(kind: type, group: str, name: str) -> Any:
    """An option of a group as its file has it; composing each would take most of the time."""
    data = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())
    return getattr(compose(f"{group}={name}", *ROWS), group) if "defaults" in data else from_data(kind, data)


def config_of(model: str, tune: str, zero: str, gpus: int) -> RunConfig:
    """What would be typed."""
    return dataclasses.replace(
        compose("model=qwen3_vl_8b", *ROWS),
        model=option(ModelConfig, "model", model),
        tune=option(TuneConfig, "tune", tune),
        zero=option(ZeroConfig, "zero", zero),
        nodes=None if gpus <= PER_HOST else gpus // PER_HOST,
        gpus=gpus if gpus <= PER_HOST else None,
    )


def planned(model: str, tune: str, zero: str, gpus: int) -> RunPlan | ConfigError:
    config = config_of(model, tune, zero, gpus)
    try:
        return make_plan(config, known(config, ram_bytes=2**42, train_rows=1000), now=NOW)
    except ConfigError as error:
        return error


def cells(model: str) -> Iterator[tuple[str, str, int]]:
    """Every setting, each with a tuning and a number of GPUs that go round from model to model."""
    first = MODELS.index(model)
    for number, zero in enumerate(ZEROS):
        yield TUNES[(first + number) % 3], zero, COUNTS[(5 * first + number) % len(COUNTS)]


REFUSED = ("zero stage 0 in bf16", "tune=qlora with zero stage 3", "hpZ")  # what no memory would help


@pytest.mark.parametrize("model", MODELS)
def test_every_plan_fits_or_says_what_would(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "COUNTS", (1, 16))  # of those beside a plan's own; golden plans have all
    for tune, zero, gpus in cells(model):
        made = planned(model, tune, zero, gpus)
        if isinstance(made, ConfigError):
            (problem,) = made.problems
            if not problem.text.startswith(REFUSED):
                assert "GiB a GPU" in problem.text
                assert "more than the 140.0 GiB of a GPU (h200); " in problem.text
                told = re.search(r"smallest number of such GPUs that fits is (\d+)|fits on no number of", problem.text)
                assert told, problem.text
                assert problem.tries or told[1] is None
            continue
        check(made, zero)


def check(made: RunPlan, zero: str) -> None:
    total, usable = sum(made.memory.values()), int(GPU_BYTES * 0.95)
    said = [text for text in made.warnings if text.startswith("memory:")]
    assert (total > usable or (zero == "auto" and "offload" in made.zero_name)) == bool(said)
    assert total <= GPU_BYTES
    assert min(made.memory.values()) >= 0
    assert made.precision == "bf16"
    assert sum(made.trainable.values()) > 0
    assert made.batch.max_tokens >= made.config.dataset.max_length
    assert made.zero_name == zero or zero == "auto"
    first, *others = made.choices
    assert (first.zero, first.max_tokens) == (made.zero_name, made.batch.max_tokens)
    assert (first.checkpointed_layers, first.gpu_bytes) == (made.checkpointed_layers, total)
    assert all(one.fits == (one.gpu_bytes <= usable) for one in made.choices)
    assert made.time is not None
    assert made.time.step_s == first.step_s
    for one in others:
        assert one.verdict
        assert first.fits or not one.fits
        if one.fits:
            assert one.step_s is not None
            assert first.step_s is not None
            assert first.step_s <= 1.01 * one.step_s
    here = next(scale for scale in made.scaling if scale.gpus == made.world_size)
    assert (here.zero, here.gpu_bytes, here.step_s) == (made.zero_name, total, first.step_s)


def asked(model: str, tune: str, gpus: int = 1) -> tuple[Ask, Shape]:
    config = config_of(model, tune, "auto", gpus)
    shape = read_shape(config.model, config.model.arch)
    room = room_of(GPU_BYTES, headroom=0.05, device="cuda", kind="h200")
    ask = Ask(
        config=config,
        shape=shape,
        files=zero_files(),
        own=None,
        precision="bf16",
        lr=1e-4,
        device="cuda",
        gpu_kind="h200",
        capability=(9, 0),
        attention="auto",
        slots=(1,),
        per_host=PER_HOST,
        room=room,
        data={},
    )
    return ask.on(gpus), shape


@pytest.mark.parametrize("zero", ["stage1", "stage2", "stage3", "stage2_offload", "stage3_offload"])
@pytest.mark.parametrize("tune", TUNES)
def test_bytes_never_grow_with_more_gpus(tune: str, zero: str) -> None:
    for model in ("qwen3_vl_reranker_8b", "qwen3_vl_30b_a3b"):
        before = None
        for gpus in range(1, 65):
            ask, shape = asked(model, tune, gpus)
            for setting, _ in finished(ask, [zero]):
                total = Scales(ask).weigh(setting, needed_tokens(ask), shape.layers).memory.total
                if gpus > 2:  # between one GPU and two the buffers of communication come in
                    assert before is not None
                    assert total <= before
                before = total
