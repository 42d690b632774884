"""What a packed sequence costs in FLOPs, and the seconds of an optimizer step, part by part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from launcher.estimates import Load, Span, TimeEstimate
from launcher.planning import fitted
from launcher.planning.flops import flops
from launcher.planning.links import Links, Sizes, links, sizes_of
from launcher.planning.rates import LAUNCH_S, Rates
from launcher.planning.setting import Setting
from launcher.planning.shapes import Shape, weights
from launcher.planning.work import GB, TERA, Work, work
from launcher.spec import CostModel

NETWORK, HOST_LINK, PROCESSOR, PICTURES = (
    f"waiting for {what}" for what in ("the network", "the host link", "the processor", "pictures")
)
OPTIMIZER, HOST_OPTIMIZER = "gradients and optimizer", "optimizer on the host's processors"
BOUNDS = {
    NETWORK: "network",
    HOST_LINK: "host link",
    PROCESSOR: "host",
    HOST_OPTIMIZER: "host",
    PICTURES: "data",
}  # other parts: compute


def cost_model(shape: Shape) -> CostModel:
    """Coefficients of the cost formula, two FLOPs for each multiply and add. Ranks balance their micro-batches by it.

    A reranker calls no lm_head, so vocabulary weights do not count; of experts, those that a token takes do. Each
    visual token runs one merger and one for every deepstack feature map; that share is spread over its patches.
    A linear-attention layer costs its projections: its own products are a small part of them.
    """
    v = shape.vision
    patch = patch_pair = 0.0
    if v is not None:
        mergers = (1 + v.deepstack) * weights(v.merger) / v.merge**2
        windows = 4.0 * v.windowed * v.window_patches * v.hidden
        patch = 2.0 * (v.patch_values * v.hidden + v.depth * weights(v.block) + mergers) + windows
        patch_pair = 4.0 * (v.depth - v.windowed) * v.hidden
    return CostModel(
        token=2.0 * shape.token_weights,
        token_pair=4.0 * len(shape.attending) * shape.q_width,
        patch=patch,
        patch_pair=patch_pair,
    )


def share_of_limit(flops: float, seconds: float, gpus: int, peak_tflops: float) -> float:
    """Model FLOPs utilisation (MFU): the FLOPs that a step needs over those that `gpus` could do in its `seconds`.

    Needed are products and attention of the forward pass, and of the backward pass those that give a gradient that is
    used: weights that do not train have none. Causal attention counts the pairs that are attended. Nothing that is
    computed again counts. `peak_tflops` is the data sheet's rate for dense bf16, or what large products reach.
    """
    return flops / (seconds * gpus * peak_tflops * TERA)


def predict(setting: Setting, step: Load, micro_steps: int, rates: Rates, *, lengths: str = "") -> TimeEstimate:
    """Seconds of an optimizer step of which `step` are the totals of all ranks, divided alike.

    `lengths` says where these come from. The slowest rank decides: it has a row more where rows don't divide evenly.
    """
    sizes = sizes_of(setting)
    micro = _share(step, setting, micro_steps)
    done, moved = work(setting, micro, sizes, rates), links(setting, sizes, rates)
    phases = _phases(done, moved)
    parts = _parts(setting, done, sizes, moved, phases, micro_steps, rates)
    step_s = sum(parts.values())
    needed = sum(passes.needed for passes in flops(setting, step).values())
    return TimeEstimate(
        step_s=step_s,
        parts=parts,
        bound=_bound(parts),
        tokens_per_s=step.tokens / step_s,
        queries_per_s=setting.config.batch.global_size / step_s,
        flops=needed,
        least_s=needed / (setting.world * rates.matmul_tflops * TERA),
        rates=rates.source,
        load=lengths,
        compute_bound_tokens=_compute_bound_tokens(setting, micro, rates),
        timeline=_timeline(done, moved, phases, parts),
    )


def _share(step: Load, setting: Setting, micro_steps: int) -> Load:
    """The mean micro-batch of the rank with the most rows. Rows are not divided between ranks."""
    rows = setting.config.batch.global_size / setting.world
    factor = math.ceil(rows - 1e-9) / rows / (setting.world * micro_steps)
    return Load(
        tokens=max(1, round(step.tokens * factor)),
        visual=round(step.visual * factor),
        patches=round(step.patches * factor),
        key_rows=round(step.key_rows * factor),
        documents=max(1, round(step.documents * factor)),
        answers=round(step.answers * factor),
        pairs=step.pairs * factor,
        patch_pairs=step.patch_pairs * factor,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """A forward or backward pass of a micro-step: the GPU's work, and what it waits for beside."""

    gpu_s: float
    host_s: float
    network_s: float

    @property
    def all_s(self) -> float:
        return self.gpu_s + self.host_s + self.network_s


def _phases(done: Work, moved: Links) -> tuple[_Phase, _Phase]:
    """The host runs ahead of the GPU, and gathers run beside it where ZeRO overlaps them: the slowest decides."""
    found = []
    beside = moved.gather_backward_s + moved.overlaps * moved.reduce_s
    passes = (
        (done.forward_s, done.host.forward, moved.gather_forward_s),
        (done.backward_s, done.host.backward + done.host.again, beside),
    )
    for gpu_s, host_s, network_s in passes:
        waits = max(0.0, host_s - gpu_s)
        hidden = gpu_s + waits if moved.overlaps else 0.0
        found.append(_Phase(gpu_s=gpu_s, host_s=waits, network_s=max(0.0, network_s - hidden)))
    return found[0], found[1]


def _parts(
    setting: Setting,
    done: Work,
    sizes: Sizes,
    moved: Links,
    phases: tuple[_Phase, _Phase],
    micro_steps: int,
    rates: Rates,
) -> dict[str, float]:
    """Seconds by part of the whole step. Scores that attention kernels compute again stay with attention."""
    n, slower, memory = micro_steps, rates.launch_s / LAUNCH_S, 1 / (rates.memory_gbs * GB)
    own = sizes.trained / setting.world if setting.stage else sizes.trained
    gradient = fitted.STAGE2_GRADIENT_BYTES if setting.stage == 2 else fitted.GRADIENT_BYTES
    optimizer = n * gradient * sizes.trained * memory
    if not moved.cpu_step_s:
        optimizer += fitted.OPTIMIZER_BYTES * own * memory
    waits = n * (sum(p.network_s for p in phases) + moved.first_gather_s) + moved.reduce_step_s + moved.gather_step_s
    exposed = 0.0 if moved.overlaps else n * moved.reduce_s
    tensor = {2: fitted.TENSOR_STEP_S, 3: fitted.TENSOR_STEP3_S}.get(setting.stage, fitted.TENSOR_STEP1_S)
    host = n * (sum(p.host_s for p in phases) + slower * fitted.MICRO_STEP_S)
    parts = {name: n * passes.needed for name, passes in done.gpu.items()}
    again = {name: n * passes.again for name, passes in done.gpu.items()}
    for name in ("attention", "head") if not setting.checkpointed_layers else ("head",):
        if name in again:
            parts[name] += again.pop(name)
    parts |= {
        "computed again": sum(again.values()),
        OPTIMIZER: optimizer,
        HOST_OPTIMIZER: moved.cpu_step_s,
        NETWORK: waits + exposed,
        HOST_LINK: n * moved.host_micro_s + moved.host_step_s,
        PROCESSOR: host + slower * (fitted.STEP_S + sizes.tensors * tensor),
    }
    # Threads make pictures meanwhile, some micro-batches ahead.
    parts[PICTURES] = n * done.pictures_s - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _bound(parts: dict[str, float]) -> str:
    """What takes most of the step."""
    sums: dict[str, float] = {}
    for name, seconds in parts.items():
        kind = BOUNDS.get(name, "compute")
        sums[kind] = sums.get(kind, 0.0) + seconds
    return max(sums, key=lambda kind: sums[kind])


def _compute_bound_tokens(setting: Setting, micro: Load, rates: Rates) -> int | None:
    """Tokens of a micro-batch from which on the GPU takes as long as what ZeRO-3 does beside: gathers, and Python.

    Both are as long for any micro-batch. None for one GPU.
    """
    if setting.world == 1:
        return None
    zero = setting.deepspeed["zero_optimization"]
    sharded = setting
    if setting.stage != 3:
        sharded = replace(setting, deepspeed={**setting.deepspeed, "zero_optimization": {**zero, "stage": 3}})
    sizes = sizes_of(sharded)
    done, moved = work(sharded, micro, sizes, rates), links(sharded, sizes, rates)
    beside = (
        (done.forward_s, max(done.host.forward, moved.gather_forward_s)),
        (done.backward_s, max(done.host.backward + done.host.again, moved.gather_backward_s + moved.reduce_s)),
    )
    return math.ceil(max(other / gpu if gpu else 0.0 for gpu, other in beside) * micro.tokens)


def _timeline(
    done: Work, moved: Links, phases: tuple[_Phase, _Phase], parts: dict[str, float]
) -> tuple[Span, ...]:  # fmt: skip
    """One micro-step and the optimizer; spans of no length are left out."""
    ahead, back = moved.first_gather_s, moved.first_gather_s + phases[0].all_s
    end = back + phases[1].all_s
    exposed = 0.0 if moved.overlaps else moved.reduce_s + moved.reduce_step_s
    ready = end + max(exposed, moved.host_micro_s)
    updated = ready + parts.get(OPTIMIZER, 0.0) + parts.get(HOST_OPTIMIZER, 0.0)
    spans = (
        Span(lane="network", name="gather weights", begin_s=0.0, end_s=max(ahead, moved.gather_forward_s)),
        Span(lane="GPU", name="forward", begin_s=ahead, end_s=back),
        Span(lane="host", name="forward", begin_s=ahead, end_s=ahead + done.host.forward),
        Span(lane="GPU", name="backward", begin_s=back, end_s=end),
        Span(lane="host", name="backward", begin_s=back, end_s=back + done.host.backward + done.host.again),
        Span(lane="network", name="gather weights", begin_s=back, end_s=back + moved.gather_backward_s),
        Span(lane="network", name="sum gradients", begin_s=end - moved.overlaps * moved.reduce_s, end_s=end + exposed),
        Span(lane="host link", name="gradients", begin_s=end, end_s=end + moved.host_micro_s),
        Span(lane="host" if moved.cpu_step_s else "GPU", name="optimizer", begin_s=ready, end_s=updated),
        Span(lane="host link", name="weights", begin_s=updated, end_s=updated + moved.host_step_s),
        Span(lane="network", name="gather weights", begin_s=updated, end_s=updated + moved.gather_step_s),
    )
    return tuple(span for span in spans if span.end_s - span.begin_s > 1e-9)
