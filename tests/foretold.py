"""What a plan foretells, written down by hand, so that pictures of it can be checked to the last character."""

from __future__ import annotations

import dataclasses

from launcher.estimates import CONTEXT, FRAGMENTS, Choice, Scale, Span, TimeEstimate
from launcher.spec import RunPlan

GIB = 2**30
MEMORY = {"frozen weights": 20, "gradients": 4, "activations of the language model": 50, FRAGMENTS: 3, CONTEXT: 3}
TIME = TimeEstimate(
    step_s=4.0,
    parts={"forward": 1.0, "backward": 2.0, "network": 0.5, "waiting for pictures": 0.25, "optimizer": 0.25},
    bound="compute",
    tokens_per_s=12_000.0,
    queries_per_s=4.0,
    flops=8e15,
    least_s=1.0,
    rates="rates of an H200, from a table",
    load="lengths of the prepared rows",
    micro_steps=2,
    micro_s=1.75,
    compute_bound_tokens=9_000,
    timeline=(
        Span(lane="GPU", name="forward", begin_s=0.0, end_s=0.5),
        Span(lane="GPU", name="backward", begin_s=0.5, end_s=1.5),
        Span(lane="GPU", name="optimizer", begin_s=1.75, end_s=2.0),
        Span(lane="network", name="gather weights", begin_s=0.0, end_s=0.02),
        Span(lane="network", name="reduce", begin_s=1.0, end_s=1.75),
    ),
)
CHOICES = (
    Choice(
        zero="stage2",
        checkpointed_layers=0,
        max_tokens=16_384,
        gpu_bytes=80 * GIB,
        step_s=4.0,
        fits=True,
        verdict="chosen",
    ),
    Choice(
        zero="stage3",
        checkpointed_layers=36,
        max_tokens=16_384,
        gpu_bytes=60 * GIB,
        step_s=5.0,
        fits=True,
        verdict="25 % slower: layers are computed twice, and their weights are gathered for it in every micro-batch",
    ),
    Choice(
        zero="stage0",
        checkpointed_layers=0,
        max_tokens=16_384,
        gpu_bytes=160 * GIB,
        step_s=None,
        fits=False,
        verdict="does not fit: 26.6 GiB too much",
    ),
)
SCALING = (
    Scale(gpus=1, zero="stage2", fits=False, gpu_bytes=160 * GIB, step_s=8.0, epoch_hours=8.0, epoch_gpu_hours=8.0),
    Scale(
        gpus=2,
        zero="stage2",
        fits=True,
        gpu_bytes=80 * GIB,
        host_bytes=12 * GIB,
        step_s=4.0,
        epoch_hours=4.0,
        epoch_gpu_hours=8.0,
    ),
    Scale(gpus=4, zero="stage2", fits=True, gpu_bytes=60 * GIB, step_s=2.5, epoch_hours=2.5, epoch_gpu_hours=10.0),
)


def foretell(plan: RunPlan) -> RunPlan:
    """The plan with all of this, for GPUs of 140 GiB."""
    return dataclasses.replace(
        plan,
        device="cuda",
        memory={name: size * GIB for name, size in MEMORY.items()},
        memory_moment="backward",
        memory_capacity=140 * GIB,
        host_memory={"weights while they load": 32 * GIB, "data workers": 8 * GIB},
        disk={"checkpoints": GIB // 4, "export": 16 * GIB},
        time=TIME,
        choices=CHOICES,
        scaling=SCALING,
        env_reasons={name: "a reason" for name, source in plan.env_sources.items() if source == "launcher"},
    )
