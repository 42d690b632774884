"""Kernels asked for where they cannot be: the plan says so, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from launcher import attention_needs
from launcher.errors import ConfigError, Problem
from launcher.planning.choices import choose_attention
from launcher.planning.describe import describe
from launcher.planning.links import sizes_of
from launcher.planning.placement import place
from launcher.planning.refit import SeenGpu, refit
from launcher.planning.states import numbers, states
from launcher.running.facts import zero_files
from launcher.spec import plan_from_json, plan_to_json
from launcher.training import attention
from launcher.training.models import DTYPES
from tests.planning_support import GIB, compose, gpus, hostfile, known, plan, setting_of

WORDS = ("model=qwen3_vl_8b", "tune=lora", "dataset.train=/t.jsonl")
H200, A100 = gpus(1), gpus(1, "NVIDIA A100-SXM4-80GB", 79.3, (8, 0))
B200, T4 = gpus(1, "NVIDIA B200", 179, (10, 0)), gpus(1, "Tesla T4", 14.7, (7, 5))


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("tune.use_dora=true", "use_dora=true makes"),
        ("model=qwen3_vl_30b_a3b", "layers of qwen3_vl_moe have other parts"),
    ],
)
def test_fused_layers_are_refused_where_they_cannot_be(word: str, why: str) -> None:
    model = () if word.startswith("model=") else ("model=qwen3_vl_8b",)
    words = (*model, word, "tune=lora", "dataset.train=/t.jsonl", "gpus=1")
    plan(*words, gpus=gpus(1))
    with pytest.raises(ConfigError, match=why):
        plan(*words, "train.kernels=fused", gpus=gpus(1))


def refusal(decide: Callable[..., Any], *args: Any) -> tuple[Problem, ...]:
    """Why a decision is refused; nothing where it is taken."""
    try:
        decide(*args)
    except ConfigError as error:
        return error.problems
    return ()


def attention_of(words: dict[str, str], here: Any) -> tuple[str, str]:
    """What a plan on such GPUs takes."""
    config = compose("model=tiny")
    train = replace(config.train, deterministic=words["train.deterministic"] == "true")
    config = replace(config, train=train, attention=replace(config.attention, name=words["attention"]))
    return choose_attention(config, place(config, known(config, gpus=here)), words["precision"], None)


def test_gpus_that_triton_does_not_know_get_plain_layers() -> None:
    words = ("model=qwen3_vl_2b", *WORDS[1:], "batch.max_tokens=2048")
    old, new = plan(*words, gpus=T4), plan(*words, gpus=A100)
    assert "layers       plain (Triton's kernels need compute capability 8.0, and the GPU has 7.5)" in describe(old)
    assert "layers       fused (every layer is of the known shape)" in describe(new)
    assert setting_of(new).fused and setting_of(new).fast_tower
    assert not setting_of(old).fused and not setting_of(old).fast_tower
    with pytest.raises(ConfigError, match=r"train\.kernels=fused: Triton[^$]*try  train\.kernels=auto"):
        plan(*words, "train.kernels=fused", gpus=T4)


STAGE3 = ("zero=stage3", "model=qwen3_vl_8b", *WORDS[1:], "batch.max_tokens=8192")


@pytest.mark.parametrize(
    ("words", "fast"),
    [
        ((), True),
        (("tune.projector=full",), False),  # gradients come as modules are called
        (("tune.projector=full", "zero=stage2"), True),
        (("tune.vision=lora",), False),
        (("zero=stage3_offload",), True),
    ],
)
def test_the_plan_knows_when_a_tower_is_gathered_at_once(words: tuple[str, ...], fast: bool) -> None:
    typed = {word.split("=")[0] for word in words}
    made = plan(*(word for word in STAGE3 if word.split("=")[0] not in typed), *words, gpus=gpus(2))
    setting = setting_of(made)
    assert setting.fast_tower == fast
    zero = {**made.deepspeed["zero_optimization"], "offload_param": {"device": "nvme"}}
    on_files = replace(setting, deepspeed={**made.deepspeed, "zero_optimization": zero})
    assert on_files.fast_tower == (fast and setting.stage < 3)


def test_a_tower_that_is_gathered_at_once_costs_fewer_calls_and_no_less_memory() -> None:
    setting = setting_of(plan(*STAGE3, gpus=gpus(2)))
    plain = replace(setting, capability=(7, 5))  # Triton's kernels are missing there, and nothing else is compared
    whole, one_by_one = (sizes_of(one, sees=True).gathers[0] for one in (setting, replace(plain, attention="varlen")))
    assert setting.shape.vision is not None
    depth, block = setting.shape.vision.depth, len(setting.shape.vision.block)
    assert one_by_one - whole >= depth * block - 1
    assert sizes_of(setting, sees=False).gathers[0] == whole - 1  # nobody runs it without a picture
    tower = sum(t.elements for t in numbers(setting).all if t.part in ("vision", "projector"))
    assert numbers(setting).tower == tower > 500e6 and numbers(plain).tower == 0
    # However little may be there at once by the user's word, the whole tower is.
    zero = {**setting.deepspeed["zero_optimization"], "stage3_max_live_parameters": 10**7}
    few = replace(setting, deepspeed={**setting.deepspeed, "zero_optimization": zero})
    assert states(few).forward["gathered weights"] >= 2 * tower


def test_gpus_that_no_table_names_are_taken_as_their_driver_tells() -> None:
    words = ("model=qwen3_vl_2b", *WORDS[1:], "batch.max_tokens=2048")
    name, gib = "NVIDIA GeForce RTX 2080 Ti", 10.6
    made = plan(*words, gpus=gpus(1, name, gib, (7, 5)))
    assert (made.capability, made.precision, setting_of(made).fused) == ((7, 5), "fp16", False)
    assert "layers       plain (Triton's kernels need compute capability 8.0, and the GPU has 7.5)" in describe(made)
    guessed = plan(*words, gpus=gpus(1, name, gib, None))
    assert f"GPU          {name}: compute capability not known, taken as 8.0 or newer" in describe(guessed)
    assert "compute capability not known" not in describe(made)
    seen = SeenGpu(
        host="localhost", index=0, name=name, total_bytes=int(gib * GIB), used_bytes=0, users="", capability=(7, 5)
    )
    found = refit(guessed, [seen], {}, zero_files(), None)
    assert (found.problems, found.plan.capability, found.plan.precision) == ((), (7, 5), "fp16")
    assert not setting_of(found.plan).fused and plan_from_json(plan_to_json(found.plan)) == found.plan
    typed = replace(guessed.config, train=replace(guessed.config.train, kernels="fused"))
    found = refit(replace(guessed, config=typed), [seen], {}, zero_files(), None)
    assert ["Triton's kernels need" in problem.text for _, problem, _ in found.problems] == [True]


@pytest.mark.parametrize("kernel", ["auto", "sdpa", *attention_needs.KERNELS])
def test_a_plan_refuses_the_attention_that_a_rank_would(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every device and in every number format; what is typed instead works."""
    monkeypatch.setattr(attention, "missing", lambda name: None)
    for package in attention.PACKAGES.values():
        monkeypatch.setattr(package, "unusable", lambda: None)
    refused = 0
    for here, precision, repeats in (
        *(((), "fp32", False), (T4, "fp16", False), (A100, "bf16", False), (B200, "bf16", False)),
        *((H200, precision, repeats) for precision in ("bf16", "fp32") for repeats in (False, True)),
    ):
        words = {"precision": precision, "train.deterministic": str(repeats).lower(), "attention": kernel}
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, here=here: here[0].capability)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda repeats=repeats: repeats)
        device, dtype = torch.device("cuda" if here else "cpu"), DTYPES[precision]
        by_rank = refusal(attention.choose_kernel, kernel, device, dtype)
        by_plan = refusal(attention_of, words, here)
        # A rank knows its number format alone by its size.
        assert [problem.tries for problem in by_plan] == [problem.tries for problem in by_rank]
        refused += bool(by_rank)
        for line in by_rank[0].tries if by_rank else ():
            attention_of(words | dict([line.split()[0].split("=")]), here)
    assert refused == {"auto": 0, "sdpa": 0, "varlen": 4, "flash_attention_2": 5}.get(kernel, 6)


def test_attention_is_refused_by_what_is_known_of_gpus_and_packages() -> None:
    words = (*WORDS, "attention=cudnn")
    with pytest.raises(ConfigError, match=r"needs compute capability 9\.0; the GPU has 8\.0[^$]*try  attention=auto"):
        plan(*words, "cluster.gpu=a100_80g", "gpus=1")
    with pytest.raises(ConfigError, match="attention=cudnn needs a GPU"):
        plan("attention=cudnn")
    elsewhere = plan(*words, hostfile=hostfile("example"), lacking="cudnn: pip")  # whose GPUs nobody has seen
    with pytest.raises(ConfigError, match="attention=cudnn needs cudnn: pip"):
        plan(*words, gpus=H200, lacking="cudnn: pip")
    seen: dict[str, Any] = {"host": elsewhere.hosts[0].name, "index": 0, "used_bytes": 0, "users": ""}
    for name, texts in (("NVIDIA A100-SXM4-80GB", ["attention=cudnn needs compute"]), ("NVIDIA H200", [])):
        found = refit(elsewhere, [SeenGpu(**seen, name=name, total_bytes=79 * GIB)], {}, zero_files(), None)
        assert [problem.text[: len("attention=cudnn needs compute")] for _, problem, _ in found.problems] == texts
