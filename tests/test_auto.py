"""What is auto: held against trying everything, what users fix, what does not fit and what is told then."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, cast

import pytest

from launcher.errors import ConfigError
from launcher.estimates import MemoryEstimate, TimeEstimate
from launcher.planning import fitting, load, memory, speed
from launcher.planning.auto import ALIKE, choose
from launcher.planning.candidates import (
    Ask,
    Scales,
    Weighed,
    fewest_layers,
    finished,
    largest,
    needed_tokens,
    token_sizes,
)
from launcher.planning.refit import SeenGpu, refit
from launcher.planning.room import room_of
from launcher.planning.shapes import read_shape
from launcher.running.facts import zero_files
from launcher.running.fit import fitted
from launcher.spec import RunPlan
from tests.planning_support import GIB, compose, gpus, plan

ROWS = ("dataset=jsonl", "dataset.train=/data/train.jsonl")
RERANKER_2B = "model=qwen3_vl_reranker_2b"
EIGHT = ("model=qwen3_vl_reranker_8b", *ROWS)
STAGES = ("stage1", "stage2", "stage3")


def ask(*words: str, slots: tuple[int, ...] = (2,), gib: float = 80, **other: Any) -> Ask:
    config = compose(*EIGHT, *words)
    values: dict[str, Any] = {
        "config": config,
        "shape": read_shape(config.model, config.model.arch),
        "files": zero_files(),
        "own": None,
        "precision": "bf16",
        "lr": 1e-4,
        "device": "cuda",
        "gpu_kind": "h100",
        "capability": (9, 0),
        "attention": "auto",
        "slots": slots,
        "per_host": 8,
        "room": room_of(int(gib * GIB), headroom=0.05, device="cuda", kind="h100"),
        "data": {},
    }
    return Ask(**{**values, **other})


def invented_bytes(setting: Any, micro: Any) -> dict[str, dict[str, int]]:
    """Grows with tokens; each recomputed layer takes its part away; stage 3 shards 20 GiB."""
    kept = micro.tokens * (setting.shape.layers - setting.checkpointed_layers) * 150_000
    again = micro.tokens * 600_000 if setting.checkpointed_layers else 0
    states = 20 * GIB // (setting.world if setting.stage == 3 else 1) + 4 * GIB // setting.stage
    return {"backward": {"states": states, "activations": kept + again}, "loading": {"states": states}}


def invented_seconds(setting: Any, step: Any, micro_steps: int, rates: Any) -> TimeEstimate:
    """Computing, a part of it twice; a fixed price for each micro-batch, dearer in stage 3."""
    parts = {
        "computing": (1 + setting.checkpointed_layers / setting.shape.layers / 3) * step.tokens / setting.world / 1e4,
        "starting": micro_steps * (0.5 if setting.stage == 3 else 0.2),
    }
    seconds = sum(parts.values())
    return TimeEstimate(
        step_s=seconds,
        parts=parts,
        bound="compute",
        tokens_per_s=step.tokens / seconds,
        queries_per_s=1.0,
        flops=1.0,
        least_s=0.1,
        rates="",
        load="",
    )


@pytest.mark.parametrize(
    "words",
    [
        ("zero=auto",),
        ("zero=stage3",),
        ("zero=auto", "batch.max_tokens=9000"),
        ("zero=stage2", "memory.gradient_checkpointing=5"),
        ("zero=auto", "memory.gradient_checkpointing=all"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("gib", [40, 60, 90, 141])
def test_the_choice_is_the_best_of_all(words: tuple[str, ...], gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search skips most settings; here every number of layers is tried with every size."""
    monkeypatch.setattr(memory, "moments", invented_bytes)
    monkeypatch.setattr(speed, "predict", invented_seconds)
    question = ask(*words, gib=gib)
    config, most = question.config, question.shape.layers
    stages = STAGES if config.zero.name == "auto" else (config.zero.name,)
    typed = {"auto": range(most + 1), "all": [most], "5": [5]}[config.memory.gradient_checkpointing]
    scales, tried = Scales(question), dict[bool, list[float]]({True: [], False: []})
    for setting, _ in finished(question, stages):
        for layers, tokens in itertools.product(typed, token_sizes(question)):
            one = scales.timed(scales.weigh(setting, tokens, layers))
            tried[one.fits].append(one.step_s)
    chosen = choose(question).chosen
    assert chosen.fits == bool(tried[True])
    if chosen.fits:
        assert chosen.step_s <= (1 + ALIKE) * min(tried[True])
        assert chosen.memory.total <= question.room.usable
    if config.batch.max_tokens != "auto":
        assert chosen.max_tokens == config.batch.max_tokens
    assert chosen.layers in typed
    assert chosen.zero in stages


EMPTY = Weighed(setting=cast(Any, None), max_tokens=0, memory=MemoryEstimate(gpu={}, moment=""), spare=0)


def test_both_searches_find_the_edge() -> None:
    """Against going through all numbers one by one."""
    for edge, bend in itertools.product(range(12), (1, 7)):

        def weigh(value: int, edge: int = edge, bend: int = bend) -> Any:
            far = value - edge
            return dataclasses.replace(EMPTY, spare=far**3 if bend == 7 else far, max_tokens=value)

        def hold(value: int, edge: int = edge, bend: int = bend) -> Any:
            far = edge - value // 1024
            return dataclasses.replace(EMPTY, spare=far * bend if far < 0 else far, max_tokens=value)

        first = fewest_layers(weigh, 10)
        assert first.fits == (edge <= 10)
        assert edge > 10 or first.max_tokens == edge
        last = largest(hold, 2048, 8192)
        assert (None if last is None else last.max_tokens) == (None if edge < 2 else min(8192, 1024 * edge))


def test_sizes_hold_the_longest_row_and_no_more_than_a_step() -> None:
    assert needed_tokens(ask("dataset.max_length=5000")) == 5120
    measured = {"train": {"lengths": {"longest": {"tokens": 2100}}}, "eval": {"lengths": {"longest": {"tokens": 3000}}}}
    assert needed_tokens(ask(data=measured)) == 3072
    long = {"train": {"lengths": {"longest": {"tokens": 30_000}}}}
    assert needed_tokens(ask(data=long)) == 4096  # documents of a row may be parted: a prompt is the least
    assert needed_tokens(ask("loss=listwise", data=long)) == 30_720
    for words in ((), ("batch.global_size=1",), ("dataset.max_length=40000",)):
        question = ask(*words)
        step = load.step_load(question.config, question.shape, {}, question.world, 32768)[0].tokens / question.world
        sizes = token_sizes(question)
        assert sizes == sorted(set(sizes))
        assert sizes[0] == needed_tokens(question)
        assert sizes[-1] <= max(sizes[0], 32768, step + 1024)


def test_documents_that_are_compared_have_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that nobody has measured: 8 documents behind half a prompt, 18,432 tokens."""
    monkeypatch.setattr(memory, "moments", invented_bytes)
    monkeypatch.setattr(speed, "predict", lambda setting, step, micro, rates: invented_seconds(setting, step, 1, rates))
    apart, together = choose(ask("zero=auto")), choose(ask("zero=auto", "loss=listwise"))
    assert apart.chosen.max_tokens < 18_432 <= together.chosen.max_tokens
    assert any("faster, but too small" in choice.verdict for choice in together.choices)
    assert choose(ask("zero=auto", "loss=listwise", gib=28)).chosen.fits


def test_reasons_name_what_costs() -> None:
    made = plan(*EIGHT, "zero=auto", "gpus=2", "cluster.gpu=h200")
    assert made.choices[0].verdict == "chosen"
    said = [choice.verdict for choice in made.choices[1:]]
    assert any("recomputes" in text and "% slower" in text for text in said)
    assert made.zero_name in STAGES
    assert made.config.zero.name == "auto"  # as asked: it is chosen anew when the run is resumed
    assert made.deepspeed["zero_optimization"]["stage"] == int(made.zero_name[-1])
    large = plan("model=qwen2_5_vl_72b", *ROWS, "zero=auto", "gpus=2", "cluster.gpu=h200")
    assert large.zero_name == "stage3"
    whole = next(choice for choice in large.choices if choice.zero == "stage2")
    assert not whole.fits
    assert whole.verdict == f"does not fit: {whole.gpu_bytes / GIB:.1f} of 133.0 GiB"


def test_a_run_on_the_cpu_is_not_searched() -> None:
    made = plan("model=tiny", "zero=auto")
    assert (made.zero_name, made.checkpointed_layers, made.batch.max_tokens) == ("stage2", 0, 8192)
    assert (made.time, made.scaling) == (None, ())
    assert plan().choices == ()


def test_a_file_of_ones_own_is_not_chosen_among_others() -> None:
    with pytest.raises(ConfigError, match=r"zero=auto chooses one of ds_configs/.*\n.*try  zero=stage2 zero.config="):
        plan("model=tiny", "zero=auto", "zero.config=/tmp/mine.json")


FULL = ("model=qwen3_vl_8b", "tune=full", *ROWS)


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*FULL, "zero=stage1", "memory.gradient_checkpointing=none", "gpus=1", "cluster.gpu=a100_80g")
    (problem,) = caught.value.problems
    assert "more than the 79.3 GiB of a GPU (a100_80g)" in problem.text
    assert "the smallest number of such GPUs that fits is" in problem.text
    assert any(
        attempt.startswith("tune=lora zero=auto memory.gradient_checkpointing=auto") for attempt in problem.tries
    )
    count = next(attempt for attempt in problem.tries if attempt.startswith(("gpus=", "nodes=")))
    made = plan(*FULL, *count.partition("   ")[0].split(), "cluster.gpu=a100_80g")  # what is told to type works
    assert not any(text.startswith("memory:") for text in made.warnings)


def test_main_memory_is_the_last_resort() -> None:
    made = plan(*FULL, "zero=auto", "gpus=1", "cluster.gpu=h200")
    assert made.zero_name in ("stage2_offload", "stage3_offload")
    (text,) = [text for text in made.warnings if text.startswith("memory:")]
    two = plan(*FULL, "zero=auto", "gpus=2", "cluster.gpu=h200").zero_name
    assert "offload" not in two
    assert "the smallest number of such GPUs that fits is 2, with zero=stage" in text


def test_what_is_typed_stays_and_what_to_type_instead_fits() -> None:
    words = ("gpus=8", "cluster.gpu=a100_80g")
    with pytest.raises(ConfigError) as caught:
        plan(*FULL, "zero=stage1", "memory.gradient_checkpointing=none", "batch.max_tokens=32768", *words)
    first = caught.value.problems[0].tries[0].partition("   ")[0]
    assert first.startswith("memory.gradient_checkpointing=auto")
    kept = [] if "max_tokens" in first else ["batch.max_tokens=32768"]
    assert plan(*FULL, *first.split(), *kept, *words).choices[0].fits


def retyped(words: tuple[str, ...], attempt: str, **facts: Any) -> RunPlan:
    """The plan of a command line once a `try` line has been typed behind it."""
    typed = attempt.partition("   ")[0].split()
    names = {word.partition("=")[0] for word in typed}
    return plan(*(word for word in words if word.partition("=")[0] not in names), *typed, **facts)


@pytest.mark.parametrize(
    ("words", "attempts"),
    [
        (  # parts that were typed stay, unless they are typed anew
            ("tune=full", "tune.vision=full", "zero=stage2", "cluster.gpu=l4", "gpus=4"),
            ("zero=auto", "nodes=2 gpus=8 zero=auto", "tune=lora tune.vision=frozen", "tune=qlora tune.vision=frozen"),
        ),
        (("batch.max_tokens=99999999", "cluster.gpu=h200"), ("batch.max_tokens=auto   (stage2", "tune=qlora")),
        (
            ("memory.headroom=0.99", "batch.max_tokens=99999999", "cluster.gpu=h100"),
            ("memory.headroom=0.05 zero=auto",),
        ),
        (("dataset.max_length=9999999", "cluster.gpu=h200"), ("dataset.max_length=",)),
        (  # of which stage 3 knows nothing
            ("tune.use_dora=true", "dataset.max_length=1024", "cluster.gpu=v100_16g", "gpus=8", "precision=fp16"),
            ("tune=lora tune.use_dora=false",),
        ),
    ],
    ids=["parts", "tokens", "headroom", "length", "dora"],
)
def test_each_way_out_is_one(words: tuple[str, ...], attempts: tuple[str, ...]) -> None:
    words = ("model=qwen3_vl_8b", *ROWS, *words)
    with pytest.raises(ConfigError) as caught:
        plan(*words)
    (problem,) = caught.value.problems
    assert len(problem.tries) == len(attempts)
    for attempt, begins in zip(problem.tries, attempts, strict=True):
        assert attempt.startswith(begins)
        assert ("needs bitsandbytes" in attempt) == ("tune=qlora" in attempt)
        assert retyped(words, attempt).choices[0].fits


def test_where_nothing_helps_that_is_told() -> None:
    words = ("model=qwen3_vl_235b_a22b", *ROWS, "cluster.gpu=t4", "gpus=1", "attention=sdpa", "memory.headroom=0.9")
    with pytest.raises(ConfigError, match="fits on no number of such GPUs up to 64\n +try  GPUs with more memory"):
        plan(*words)


def test_an_assumed_kind_of_gpu_refuses_nothing() -> None:
    made = plan("model=qwen2_5_vl_72b", *ROWS, "nodes=2")
    (text,) = [text for text in made.warnings if text.startswith("memory:")]
    assert "(h100, assumed)" in text
    assert "the smallest number of such GPUs that fits is" in text


def test_headroom_stays_free() -> None:
    words = (*EIGHT, "zero=stage2", "memory.gradient_checkpointing=none", "cluster.gpu=h200", "gpus=1")
    half = plan(*words, "memory.headroom=0.5")
    assert half.choices[0].fits
    assert sum(half.memory.values()) <= 70 * GIB
    assert half.batch.max_tokens < plan(*words).batch.max_tokens
    tight = plan(*words, f"batch.max_tokens={half.batch.max_tokens}", "memory.headroom=0.9")
    (text,) = [text for text in tight.warnings if text.startswith("memory:")]
    assert "nearly all of the 140.0 GiB of a GPU (h200); memory.headroom=0.9 leaves 14.0 GiB" in text


def test_main_memory_counts_too() -> None:
    words = (*FULL, "zero=stage3_offload")
    needed = sum(plan(*words, gpus=gpus(1), ram_bytes=2**42).host_memory.values())
    plan(*words, gpus=gpus(1), ram_bytes=needed)
    with pytest.raises(ConfigError, match="of main memory are needed for 1 rank of a host"):
        plan(*words, gpus=gpus(1), ram_bytes=needed - 1)


@pytest.mark.parametrize(
    ("words", "ranks", "gib", "tried"),
    [
        ((*EIGHT, "precision=fp32"), 4, 64, ["zero=stage3", "gpus=1"]),
        ((*EIGHT, "precision=fp32"), 4, 20, []),
        ((*EIGHT, "memory.vision_cache_gib=40"), 4, 32, ["memory.vision_cache_gib=4.25"]),
        ((*EIGHT, "memory.vision_cache_gib=40"), 4, 64, ["memory.vision_cache_gib=11.5", "gpus=1"]),
        ((*EIGHT,), 1, 20, ["checkpoint.export=false"]),
        ((*EIGHT,), 4, 20, []),
        ((*FULL, "zero=stage2_offload"), 4, 120, ["zero=auto"]),
    ],
)
def test_what_is_typed_against_too_little_main_memory_fits(
    words: tuple[str, ...], ranks: int, gib: int, tried: list[str]
) -> None:
    with pytest.raises(ConfigError, match="GiB of main memory are needed") as caught:
        plan(*words, gpus=gpus(ranks), ram_bytes=gib * GIB)
    tries = [line.split()[0] for line in caught.value.problems[0].tries if "=" in line.split()[0]]
    assert len(tries) == len(tried) and all(map(str.startswith, tries, tried)), tries
    for line in tries:
        others = (word for word in words if word.split("=")[0] != line.split("=")[0])
        plan(*others, line, gpus=gpus(ranks), ram_bytes=gib * GIB)


@pytest.mark.parametrize(("gib", "tried"), [(2048, ["zero=auto", "nodes=3"]), (128, ["nodes=3"])])
def test_what_is_typed_against_small_gpus_fits_main_memory(gib: int, tried: list[str]) -> None:
    small = {"gpus": gpus(4, "NVIDIA GeForce RTX 4090", 24, (8, 9)), "ram_bytes": gib * GIB}
    with pytest.raises(ConfigError, match="more than the 24.0 GiB of a GPU") as caught:
        plan(*FULL, "zero=stage2", **small)
    tries = [line.split("   ")[0].split() for line in caught.value.problems[0].tries]
    assert [words[0] for words in tries] == [*tried, "tune=lora", "tune=qlora"]
    for words in tries:
        if words[0] != "nodes=3":  # for which a hostfile would be needed
            plan(*FULL[:1], *ROWS, *(FULL[1:2] if words[0] == "zero=auto" else ()), *words, **small)


def test_ranks_of_a_host_share_the_pages_of_mapped_weights() -> None:
    """8B on four GPUs of 24 GB in a machine with 64 GiB; float32 is converted, by each rank for itself."""
    made = plan(*EIGHT, gpus=gpus(4, "NVIDIA GeForce RTX 4090", 24, (8, 9)), ram_bytes=64 * GIB)
    assert sum(made.host_memory.values()) < 32 * GIB
    with pytest.raises(ConfigError, match=r"GiB of it for loading.*\n +try  zero=stage3 "):
        plan(*EIGHT, "precision=fp32", gpus=gpus(4), ram_bytes=64 * GIB)


def test_a_host_too_small_for_the_export_trains_without_it() -> None:
    machine = {"gpus": gpus(1, "NVIDIA GeForce RTX 4090", 24, (8, 9)), "ram_bytes": 16 * GIB}
    with pytest.raises(ConfigError, match="try  checkpoint.export=false"):
        plan(*EIGHT, "tune=qlora", **machine)
    plan(*EIGHT, "tune=qlora", "checkpoint.export=false", **machine)


def test_an_adapter_alone_needs_little_disk() -> None:
    words, free = ("model=qwen2_5_72b", *ROWS, "zero=auto"), {"gpus": gpus(8), "disk_free_bytes": 50 * GIB}
    with pytest.raises(ConfigError, match="try  checkpoint.export=false"):
        plan(*words, **free)
    assert plan(*words, "checkpoint.merge=false", **free).disk["export"] < GIB


def test_micro_batches_below_the_longest_prompt_are_told() -> None:
    told = "batch.max_tokens=64 is below dataset.max_length=4096"
    assert any(told in text for text in plan(*EIGHT, "batch.max_tokens=64", gpus=gpus(1)).warnings)


@pytest.mark.parametrize(
    ("words", "gib", "attempts"),
    [
        ((RERANKER_2B, "gpus=2"), 16, ("memory.gradient_checkpointing=all gpus=1 ",)),
        ((RERANKER_2B, "gpus=2", "tune=full"), 24, ("memory.gradient_checkpointing=all tune=qlora ",)),
        ((RERANKER_2B, "gpus=2", "zero=stage2_offload"), 16, ("memory.gradient_checkpointing=all gpus=1 ",)),
        ((RERANKER_2B, "gpus=1", "memory.vision_cache_gib=12"), 16, ("memory.vision_cache_gib=0 memory.",)),
        (("model=qwen3_vl_8b", "gpus=2"), 16, ("hosts with GPUs, or",)),
    ],
    ids=["ranks", "tuning", "offloaded", "features", "nothing"],
)
def test_each_way_into_main_memory_is_one(words: tuple[str, ...], gib: int, attempts: tuple[str, ...]) -> None:
    words, here = (*words, *ROWS, "checkpoint.export=false"), {"ram_bytes": gib * GIB, "disk_free_bytes": 2**50}
    with pytest.raises(ConfigError, match="GiB of it with any micro-batch: more than the") as caught:
        plan(*words, **here)
    (problem,) = caught.value.problems
    assert len(problem.tries) >= len(attempts)
    for attempt, begins in zip(problem.tries, attempts, strict=False):
        assert attempt.startswith(begins)
    assert problem.tries[-2:] == fitting.ELSEWHERE
    for attempt in problem.tries[:-2]:
        assert not any(text.startswith("memory:") for text in retyped(words, attempt, **here).warnings)


def test_an_export_too_large_for_a_cpu_machine_is_told_before_it_trains() -> None:
    words = ("model=qwen3_vl_4b", *ROWS, "tune=qlora", "gpus=1", "memory.gradient_checkpointing=all")
    with pytest.raises(
        ConfigError, match="of it for export, and localhost has 16.0 GiB\n +try  checkpoint.export=false"
    ):
        plan(*words)
    plan(*words, "checkpoint.export=false")


def test_main_memory_of_unseen_cpu_hosts_is_no_gpu() -> None:
    made = plan(*EIGHT, "zero=auto", "env.set.DS_ACCELERATOR=cpu", ram_bytes=None)
    assert (made.device, made.zero_name) == ("cpu", "stage2")
    assert not any(text.startswith("memory:") for text in made.warnings)
    assert refitted(made, ram={"localhost": 2**42}).problems == ()  # once its host has told
    small = refitted(made, ram={"localhost": 24 * GIB}).problems
    assert ["more than the" in problem.text or "of main memory" in problem.text for _, problem, _ in small] == [
        True
    ] * 2


def test_the_kind_that_is_typed_is_planned_for() -> None:
    here = {"gpus": gpus(1, "NVIDIA GeForce RTX 4090", 24, (8, 9))}
    made = plan(*EIGHT, "cluster.gpu=h200", **here)
    assert (made.gpu_kind, made.memory_capacity) == ("h200", 140 * GIB)
    assert any("this machine has NVIDIA GeForce RTX 4090" in text for text in made.warnings)
    by_hand = plan(*EIGHT, "cluster.transport=manual", "nodes=2", "gpus=4", "cluster.gpu=l4")
    assert (by_hand.device, by_hand.world_size) == ("cuda", 8)
    assert any(
        "cluster.gpu=l4 has no effect" in text for text in plan("cluster.transport=local", "cluster.gpu=l4").warnings
    )


def seen(host: str = "localhost", index: int = 0, used: float = 0.0, **other: Any) -> SeenGpu:
    values = {"name": "NVIDIA H200", "total_bytes": int(140.4 * GIB), "users": "python of eve (pid 7)" if used else ""}
    return SeenGpu(host=host, index=index, used_bytes=int(used * GIB), **{**values, **other})


def refitted(made: RunPlan, *found: SeenGpu, ram: dict[str, int] | None = None) -> Any:
    return refit(made, found, ram or {}, zero_files(), None)


def test_a_plan_for_these_very_gpus_stays_as_it_is() -> None:
    made = plan(*EIGHT, "zero=auto", gpus=gpus(2))
    found = refitted(made, seen(), seen(index=1))
    assert found.plan is made
    assert (found.problems, found.notes) == ((), ())
    assert refitted(plan("model=tiny"), seen()).plan == plan("model=tiny")  # on CPU


def test_what_others_hold_changes_what_is_auto() -> None:
    made = plan(*EIGHT, "zero=auto", gpus=gpus(2))
    found = refitted(made, seen(), seen(index=1, used=100))
    free = int(140.4 * GIB) - 100 * GIB
    assert found.problems == ()
    assert sum(found.plan.memory.values()) <= free - 0.05 * 140 * GIB
    assert found.plan.batch.max_tokens < made.batch.max_tokens or found.plan.checkpointed_layers
    (note,) = found.notes
    assert f"instead of {made.batch.max_tokens:,}" in note or "recomputed layers" in note
    assert "of GPU 1 of localhost (NVIDIA H200), of which 100.0 GiB are in use by python of eve (pid 7)" in note
    assert found.plan.config == made.config


def test_what_is_fixed_and_no_longer_fits_is_an_error() -> None:
    words = ("zero=stage2", "memory.gradient_checkpointing=none", "batch.max_tokens=8192")
    made = plan(*EIGHT, *words, gpus=gpus(2))
    ((host, problem, edit),) = refitted(made, seen(), seen(index=1, used=120)).problems
    assert (host, edit) == ("localhost", False)  # a machine is to be freed
    assert "120.0 GiB are in use by python of eve (pid 7)" in problem.text
    assert problem.tries[0].startswith("nvidia-smi")
    assert "cluster.exclude=localhost:1   (leaves that GPU out)" in problem.tries


def test_gpus_of_other_hosts_are_known_once_they_are_seen() -> None:
    words = (*EIGHT, "zero=auto", "nodes=2")
    made = plan(*words)
    t4: dict[str, Any] = {"name": "Tesla T4", "total_bytes": int(14.7 * GIB)}
    found = refitted(made, *(seen(host.name, n, **t4) for host in made.hosts for n in host.gpus))
    assert found.plan.gpu_kind == "Tesla T4"
    assert (made.precision, found.plan.precision) == ("bf16", "fp16")
    assert found.plan.deepspeed["fp16"]["enabled"]
    assert "bf16" not in found.plan.deepspeed
    ram = {host.name: 8 * GIB for host in made.hosts}
    roomy = refitted(made, *(seen(host.name, n) for host in made.hosts for n in host.gpus), ram=ram)
    assert not any(text.startswith("memory:") for text in roomy.plan.warnings)
    assert {host for host, _, _ in roomy.problems} == {host.name for host in made.hosts}
    assert all("GiB of main memory are needed for 8 ranks" in problem.text for _, problem, _ in roomy.problems)


def test_the_oldest_gpu_decides_the_number_format() -> None:
    """Though another has less memory; what was planned for cluster.gpu=KIND is no other."""
    made = plan(*EIGHT, "zero=auto", "nodes=2", "gpus=1", "cluster.gpu=a10")
    small: dict[str, Any] = {"name": "NVIDIA A10", "total_bytes": int(22.5 * GIB)}
    old: dict[str, Any] = {"name": "Tesla V100-SXM2-32GB", "total_bytes": int(31.7 * GIB)}
    found = refitted(made, seen("node1", **small), seen("node2", **old))
    assert (made.precision, found.plan.precision) == ("bf16", "fp16")
    assert found.plan.precision_reason == "Tesla V100-SXM2-32GB of node2"


def test_probes_tell_the_planner() -> None:
    """GPUs as `nvidia-smi` lists them there, of which the run uses the second; a CPU run asks for none."""
    user = {"pid": 7, "name": "/usr/bin/python", "user": "eve", "bytes": 130 * GIB}
    listed = [
        {"index": n, "name": "NVIDIA H200", "total": int(140.4 * GIB), "used": 130 * GIB * n, "users": [user] * n}
        for n in (0, 1)
    ]
    looks = {"localhost": {"gpus": listed, "memory": {"total": 2**42}}}
    words = ("zero=stage2", "batch.max_tokens=8192", "memory.gradient_checkpointing=none")
    made = plan(*EIGHT, *words, "gpus=[1]", gpus=gpus(2))
    _, (finding,) = fitted(made, looks)
    assert (finding.host, finding.what, finding.config) == ("localhost", "memory", False)
    assert "130.0 GiB are in use by python of eve (pid 7, 139.6 GB)" in finding.reason
    free = plan(*EIGHT, *words, "gpus=[0]", gpus=gpus(2))
    assert fitted(free, looks)[1] == []
    listed[0]["capability"] = [7, 5]  # as if they were older than their name says
    older, _ = fitted(free, looks)
    assert (older.plan.capability, older.plan.precision) == ((7, 5), "fp16")
    dumb = {"localhost": {"gpus": {"failed": "no nvidia-smi"}, "memory": {"failed": "unreadable"}}}
    assert fitted(made, dumb)[0].plan is made
