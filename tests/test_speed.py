"""FLOPs against those that torch counts; seconds against measured runs; what must hold of any prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from launcher import measured
from launcher.estimates import Load
from launcher.planning.flops import flops
from launcher.planning.gpus import GPU_KINDS, kind_of
from launcher.planning.memory import estimate
from launcher.planning.rates import REFERENCE, measured_on, rates_of
from launcher.planning.setting import Setting
from launcher.planning.shapes import read_shape
from launcher.planning.speed import BOUNDS, PICTURES, predict, share_of_limit
from launcher.spec import RunPlan
from launcher.training import calibrate
from launcher.training.batching import MicroBatch, make_units
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.processors import load_processor
from tests.bench.speed_runs import FUSED_RUNS, LOADS, RERANKER, RUNS, Run, foretold, foretold_fused, setting_of, times
from tests.groups import group, packed, picture
from tests.tiny import family_plan

FULL = {"name": "full", "language": "full", "vision": "frozen", "projector": "frozen"}
LORA = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen", "r": 4}
SFT = {"task": {"name": "sft", "instruction": None}, "loss": {"name": "cross_entropy"}}
FUSED = {"train": {"kernels": "fused"}}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "lora, recomputed": ("qwen3_vl", {"tune": LORA}, 2),
    "full": ("qwen3_vl", {"tune": FULL}, 0),
    "all trains, recomputed": ("qwen3_vl", {"tune": {**FULL, "vision": "full", "projector": "full"}}, 2),
    "projector alone": ("qwen3_vl", {"tune": {**FULL, "language": "frozen", "projector": "full"}}, 0),
    "lora everywhere": ("qwen3_vl", {"tune": {**LORA, "vision": "lora", "projector": "lora"}}, 0),
    "lora in the tower, recomputed": ("qwen3_vl", {"tune": {**LORA, "language": "frozen", "vision": "lora"}}, 2),
    "windows": ("qwen2_5_vl", {"tune": {**LORA, "vision": "lora"}}, 0),
    "text, recomputed": ("qwen3", {"tune": LORA}, 2),
    "chat, tied head": ("qwen3_vl", {"tune": FULL, **SFT}, 0),
    "fused": ("qwen3", {"tune": {**FULL, "vision": "full"}, **FUSED}, 1),
    "fused, chat": ("qwen3_vl", {"tune": FULL, **SFT, **FUSED}, 0),
}


def tiny_setting(plan: RunPlan, layers: int) -> Setting:
    """The plan as the planner sees it."""
    return Setting(
        config=plan.config,
        shape=read_shape(plan.config.model, plan.arch),
        deepspeed=plan.deepspeed,
        precision="fp32",
        device="cpu",
        gpu_kind=None,
        capability=None,
        world=1,
        slots=1,
        checkpointed_layers=layers,
        attention="reference",
    )


def counted(run: Any) -> int:
    """FLOPs of a call, as torch counts them."""
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}  # which torch leaves out
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


def load_of(plan: RunPlan, batch: MicroBatch) -> Load:
    """What a micro-batch of one prompt and one picture holds; the CPU's attention computes masked pairs too."""
    patches = 0 if batch.pixel_values is None else len(batch.pixel_values)
    return Load(
        tokens=batch.tokens,
        visual=0 if batch.visual_rows is None else len(batch.visual_rows),
        patches=patches,
        answers=len(batch.predicted),
        pairs=float(batch.tokens**2),
        patch_pairs=float(patches**2),
    )


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_that_torch_counts(name: str, tmp_path: Path) -> None:
    family, config, layers = CASES[name]
    plan = replace(family_plan(tmp_path, family, **config), checkpointed_layers=layers)
    processor = load_processor(plan)
    query = ("what is it",) if family == "qwen3" else (picture(1), "what is it")
    encoded = [make_encoder(plan, processor).encode(group(query, ("a red door of the house",)))]
    batch = packed(processor, encoded, make_units(encoded, plan.cost, 8192, splittable=False))
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    outputs: list[torch.Tensor] = []
    forward = counted(lambda: outputs.append(scorer(batch)))
    backward = counted(lambda: outputs[0].sum().backward())
    expected = flops(tiny_setting(plan, layers), load_of(plan, batch))
    assert sum(part.forward for part in expected.values()) == forward
    # The CPU's attention keeps its scores, so the kernel's own recomputation is none of torch's count.
    again = {part: passes.again for part, passes in expected.items()}
    for part in ("attention", "vision attention"):
        passes = expected.get(part)
        if passes is not None and passes.backward:
            again[part] -= 0.5 * passes.forward
    assert sum(part.backward for part in expected.values()) + sum(again.values()) == backward


def test_measured_runs_are_foretold() -> None:
    """Within 15 %, those that no constant was fitted on too."""
    assert 2 * sum(run.fit for run in RUNS) <= len(RUNS)
    errors = [foretold(run).step_s / run.step_s - 1 for run in RUNS]
    assert max(map(abs, errors)) < 0.15
    assert sum(map(abs, errors)) / len(errors) < 0.075


@pytest.mark.parametrize("run", FUSED_RUNS, ids=lambda run: run.name)
def test_measured_runs_with_fused_layers_are_foretold(run: Run) -> None:
    assert foretold_fused(run).step_s == pytest.approx(run.step_s, rel=0.05)


@pytest.mark.parametrize(("workload", "faster"), [("page", 0.97), ("chat", 0.99), ("text", 0.99), ("imgq", 0.99)])
def test_flash_attn_4_is_foretold_as_measured(workload: str, faster: float) -> None:
    """Steps of 8 rows on one H200, tests/bench/RESULTS.md: 2.0885, 1.8245, 1.1195 and 0.9435 s."""
    words = next(run.words for run in FUSED_RUNS if run.workload == workload)
    measured = {"page": 2.0885, "chat": 1.8245, "text": 1.1195, "imgq": 0.9435}[workload]
    one = setting_of(words, stage="stage1", queries=8)
    load = times(LOADS[workload], 2)
    new, old = (replace(one, attention=name) for name in ("flash_attention_4", "cudnn"))
    seconds = [predict(setting, load, 1, rates_of("h200")).step_s for setting in (new, old)]
    assert seconds[0] == pytest.approx(measured, rel=0.05) and seconds[0] < faster * seconds[1]
    held = [sum(estimate(setting, load).gpu.values()) for setting in (new, old)]
    assert held[0] <= held[1]  # measured: 0.0 to 1.8 GiB less


def test_only_too_few_threads_make_a_gpu_wait_for_pictures() -> None:
    images = 400
    load = replace(times(LOADS["page"], 4), patches=images * 4032, patch_pairs=images * 4032.0**2)
    words = (RERANKER, "tune=lora")
    enough, one = (
        predict(setting_of((*words, f"dataset.workers={n}"), queries=16), load, 2, rates_of("h200")) for n in (3, 1)
    )
    assert PICTURES not in enough.parts and 0 < one.parts[PICTURES] == pytest.approx(one.step_s - enough.step_s)
    # A page of 4,032 patches takes one thread 27 ms: nothing else is done meanwhile that would take longer.
    assert one.step_s == pytest.approx(images * 0.027, rel=0.01)


def test_rows_that_do_not_fill_micro_batches_alike_take_no_longer() -> None:
    lora = setting_of((RERANKER, "tune=lora"), queries=16)
    five, eight = (predict(lora, BIG, n, rates_of("h200")).parts["language layers"] for n in (5, 8))
    assert five == pytest.approx(eight, rel=0.02)


BIG = times(LOADS["text"], 8)  # 32 queries
MODELS = {
    "qwen3_vl_reranker_8b": ("tune=full",),
    "qwen2_5_vl_72b": ("tune=lora",),
    "qwen3_vl_30b_a3b": ("tune=lora", "tune.vision=lora", "tune.projector=full"),
    "qwen3_5_9b": ("tune=lora",),
    "qwen3_14b": ("tune=full",),
}


def seconds(words: tuple[str, ...], load: Load = BIG, micro_steps: int = 4, **more: Any) -> float:
    """Of a step of 32 queries."""
    return predict(setting_of(words, queries=32, **more), load, micro_steps, rates_of("h200")).step_s


@pytest.mark.parametrize("model", MODELS)
def test_more_gpus_of_a_host_never_take_longer(model: str) -> None:
    words = (f"model={model}", *MODELS[model])
    for stage in ("stage0", "stage1", "stage2", "stage3"):
        found = [seconds(words, micro_steps=8 // n, gpus=n, stage=stage) for n in (1, 2, 4, 8)]
        assert found == sorted(found, reverse=True), stage


def test_what_costs_more_takes_longer() -> None:
    lora, full = (RERANKER, "tune=lora"), (RERANKER, "tune=full")
    assert seconds(lora) < seconds((*lora, "memory.gradient_checkpointing=all"))
    assert seconds(lora) < seconds(full)
    assert seconds(lora) < seconds((*lora, "tune.use_dora=true"))
    assert seconds(lora) < seconds(lora, times(BIG, 1.1)) and seconds(lora) < seconds(lora, micro_steps=8)
    assert seconds(lora, gpus=2) < seconds(lora, gpus=2, stage="stage3")
    assert seconds(full, gpus=8) < seconds(full, gpus=8, stage="stage2_offload")
    assert seconds(full, gpus=8, stage="stage3") < seconds(full, gpus=8, stage="stage3_offload")
    assert seconds(full, gpus=8, stage="stage1") < seconds(full, gpus=8, stage="stage1", slots=1)
    # Rows are not divided: eight ranks take as long for four queries as four do.
    few = [predict(setting_of(lora, gpus=n, queries=4), LOADS["text"], 1, rates_of("h200")).step_s for n in (4, 8)]
    assert few[1] >= few[0]


def test_what_an_estimate_tells() -> None:
    short = times(LOADS["text"], 0.25)  # of a GPU: the host needs longer for it
    one, two = (predict(setting_of((RERANKER, "tune=lora"), gpus=n, stage="stage3"), times(short, n), 1,
                        rates_of("h200"), lengths="counted") for n in (1, 2))  # fmt: skip
    for found in (one, two):
        assert found.step_s == pytest.approx(sum(found.parts.values())) and all(s > 0 for s in found.parts.values())
        assert found.load == "counted" and found.rates.startswith("usual rates of h200")
        assert found.least_s < found.step_s and 0 < share_of_limit(found.flops, found.step_s, 1, 794.0) < 1
        assert all(span.begin_s < span.end_s for span in found.timeline)
        assert {span.lane for span in found.timeline} >= {"GPU", "host"}
        assert set(BOUNDS.values()) | {"compute"} >= {found.bound}
    assert one.compute_bound_tokens is None and two.bound == "host"
    threshold = two.compute_bound_tokens
    assert threshold is not None and threshold > short.tokens
    wide = times(short, 4.4 * threshold / short.tokens)
    full = predict(setting_of((RERANKER, "tune=lora"), gpus=2, stage="stage3"), wide, 1, rates_of("h200"))
    assert full.bound == "compute" and abs((full.compute_bound_tokens or 0) / threshold - 1) < 0.1


@pytest.mark.parametrize("stage", ["stage0", "stage1", "stage2", "stage2_offload", "stage3", "stage3_offload"])
@pytest.mark.parametrize("late", [False, True])
def test_a_timeline_adds_up_to_the_step(stage: str, *, late: bool) -> None:
    """What the host does before the first kernel and at the end of a step, and pictures that come late, are in it."""
    words = (RERANKER, "tune=lora", *(["dataset.workers=1"] if late else []))
    load = replace(LOADS["page"], tokens=600, pairs=1e5, patches=10**7) if late else LOADS["page"]
    for gpus in (1, 2):
        found = predict(setting_of(words, gpus=gpus, stage=stage), load, 3, rates_of("h200"))
        end = max(span.end_s for span in found.timeline)
        assert found.step_s == pytest.approx(found.micro_steps * found.micro_s + end - found.micro_s), gpus
        assert {"begin", "finish"} < {span.name for span in found.timeline if span.lane == "host"}
        assert ("pictures" in {span.name for span in found.timeline}) == (PICTURES in found.parts) == late


def test_kinds_of_gpus_have_rates() -> None:
    assert kind_of("NVIDIA A100-SXM4-80GB") is GPU_KINDS["a100_80g"] and kind_of("NVIDIA A100-SXM4-40GB") is not None
    assert kind_of("NVIDIA GeForce RTX 4090") is GPU_KINDS["rtx4090"] and kind_of("NVIDIA L40S") is GPU_KINDS["l40s"]
    assert kind_of("Tesla T4") is GPU_KINDS["t4"] and kind_of("AMD MI300X") is None
    assert all(0.5 < kind.matmul_tflops / kind.peak_tflops < 1 for kind in GPU_KINDS.values())
    assert "which is assumed" in rates_of(None).source and "AMD MI300X is not known" in rates_of("AMD MI300X").source
    assert "network assumed: 320 Gb/s a GPU" in rates_of("h200", hosts=2).source


def test_measured_rates_are_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured.read_speeds() == []
    gpu = {"matmul_tflops": 700.0, "memory_gbs": 4000.0, "launch_s": 8e-6}
    slow = {**gpu, "matmul_tflops": 650.0, "launch_s": 9e-6}
    content = {"version": measured.VERSION, "kind": "NVIDIA H200", "date": "2026-01-02"}
    for host, date, rates in (("a", "2026-01-03", gpu), ("b/1", "2026-01-02", calibrate.joined([gpu, slow]))):
        file = measured.speed_file(host)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**content, "host": host, "date": date, **rates}))
    (measured.speed_dir() / "old.json").write_text('{"version": 0}')
    (measured.speed_dir() / "broken.json").write_text("{")
    assert [found["host"] for found in measured.read_speeds()] == ["a", "b/1"], "the newest first"
    monkeypatch.setattr("socket.gethostname", lambda: "b/1")
    first = measured.read_speeds()[0]
    assert first["host"] == "b/1", "but this host's before all others"
    assert measured_on("h200", [first]) is first and measured_on("h100", [first]) is None is measured_on(None, [first])
    rates = rates_of("h200", first)
    # An H200 as fast as the one that the constants were fitted on has the usual rates; this one is slower in products.
    usual = rates_of("h200")
    assert rates.matmul_tflops == pytest.approx(usual.matmul_tflops * 650 / REFERENCE["matmul_tflops"])
    assert rates.launch_s == pytest.approx(usual.launch_s * 9e-6 / REFERENCE["launch_s"])
    assert rates.link_gbs == usual.link_gbs
    assert rates_of("h200", {**first, **REFERENCE}).matmul_tflops == usual.matmul_tflops
    assert rates.source == "measured on b/1, 2026-01-02"


def test_what_calibration_calls_works_on_a_cpu(tmp_path: Path) -> None:
    cpu, short = torch.device("cpu"), 1e-4
    found = [
        calibrate.matmul_tflops(cpu, (8, 16, 16), short),
        calibrate.memory_gbs(cpu, 1024, short),
        calibrate.attention_tflops(cpu, 16, 4, short),
        calibrate.launch_s(cpu, short),
        calibrate.host_gbs(cpu, 1024, short),
    ]
    assert all(value > 0 for value in found)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert calibrate.link_gbs(cpu, 1024, short) == 0, "one rank receives nothing"
    finally:
        torch.distributed.destroy_process_group()
    gpus = [{"matmul_tflops": 700.0, "launch_s": 8e-6}, {"matmul_tflops": 650.0, "launch_s": 9e-6}]
    text = calibrate.table({"kind": "NVIDIA H200", "host": "a", "gpus": gpus, **calibrate.joined(gpus)})
    assert text.splitlines()[0] == "2 x NVIDIA H200 on a, the slowest of them"
    assert "650.0 TFLOP/s   (650.0 to 700.0)" in text and "9.0 us   (8.0 to 9.0)" in text


def test_a_machine_without_a_gpu_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert calibrate.main(["--out", str(tmp_path / "speed.json")]) == 3
    assert "no GPU is visible here" in capsys.readouterr().err and not (tmp_path / "speed.json").exists()
