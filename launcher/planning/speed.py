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
    micro = _share(step, setting, micro_steps)
    sizes = sizes_of(setting, sees=micro.patches > 0)
    done, moved = work(setting, micro, sizes, rates), links(setting, sizes, rates)
    phases = _phases(done, moved)
    beside = _beside(setting, sizes, moved, rates)
    parts = _parts(setting, done, moved, phases, beside, micro_steps)
    timeline, micro_s = _timeline(done, moved, phases, beside, parts.get(PICTURES, 0.0) / micro_steps)
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
        micro_steps=micro_steps,
        micro_s=micro_s,
        timeline=timeline,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Beside:
    """Seconds beside the passes: of the host before each micro-step's first kernel, of the GPU for its gradients; then
    of both once a step."""

    begin_s: float
    gradients_s: float
    finish_s: float
    optimizer_s: float


def _beside(setting: Setting, sizes: Sizes, moved: Links, rates: Rates) -> _Beside:
    slower, memory = rates.launch_s / LAUNCH_S, 1 / (rates.memory_gbs * GB)
    own = sizes.trained / setting.world if setting.stage else sizes.trained
    gradient = fitted.STAGE2_GRADIENT_BYTES if setting.stage == 2 else fitted.GRADIENT_BYTES
    sharded = fitted.FUSED_STEP3_S if setting.fused else fitted.TENSOR_STEP3_S
    tensor = {2: fitted.TENSOR_STEP_S, 3: sharded}.get(setting.stage, fitted.TENSOR_STEP1_S)
    return _Beside(
        begin_s=slower * fitted.MICRO_STEP_S,
        gradients_s=gradient * sizes.trained * memory,
        finish_s=slower * (fitted.STEP_S + sizes.tensors * tensor),
        optimizer_s=0.0 if moved.cpu_step_s else fitted.OPTIMIZER_BYTES * own * memory,
    )


def _parts(
    setting: Setting, done: Work, moved: Links, phases: tuple[_Phase, _Phase], beside: _Beside, micro_steps: int
) -> dict[str, float]:
    """Seconds by part of the whole step. Scores that attention kernels compute again stay with attention."""
    n = micro_steps
    waits = n * (sum(p.network_s for p in phases) + moved.first_gather_s) + moved.reduce_step_s + moved.gather_step_s
    exposed = 0.0 if moved.overlaps else n * moved.reduce_s
    parts = {name: n * passes.needed for name, passes in done.gpu.items()}
    again = {name: n * passes.again for name, passes in done.gpu.items()}
    for name in ("attention", "head") if not setting.checkpointed_layers else ("head",):
        if name in again:
            parts[name] += again.pop(name)
    parts |= {
        "computed again": sum(again.values()),
        OPTIMIZER: n * beside.gradients_s + beside.optimizer_s,
        HOST_OPTIMIZER: moved.cpu_step_s,
        NETWORK: waits + exposed,
        HOST_LINK: n * moved.host_micro_s + moved.host_step_s,
        PROCESSOR: n * (sum(p.host_s for p in phases) + beside.begin_s) + beside.finish_s,
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
    sizes = sizes_of(sharded, sees=micro.patches > 0)
    done, moved = work(sharded, micro, sizes, rates), links(sharded, sizes, rates)
    beside = (
        (done.forward_s, max(done.host.forward, moved.gather_forward_s)),
        (done.backward_s, max(done.host.backward + done.host.again, moved.gather_backward_s + moved.reduce_s)),
    )
    return math.ceil(max(other / gpu if gpu else 0.0 for gpu, other in beside) * micro.tokens)


def _timeline(
    done: Work, moved: Links, phases: tuple[_Phase, _Phase], beside: _Beside, pictures_s: float
) -> tuple[tuple[Span, ...], float]:
    """One micro-step and the optimizer, and when the micro-step ends; spans of no length are left out.

    Lengths are those that `_parts` adds up: a step is its micro-steps and what comes behind the first one here.
    """
    begun = pictures_s + beside.begin_s
    ahead = begun + moved.first_gather_s
    back = ahead + phases[0].all_s
    end = back + phases[1].all_s
    summed = end + (0.0 if moved.overlaps else moved.reduce_s)
    sent = summed + moved.host_micro_s
    micro = sent + beside.gradients_s
    whole = micro + moved.reduce_step_s
    told = whole + beside.finish_s
    updated = told + beside.optimizer_s + moved.cpu_step_s
    back_up = updated + moved.host_step_s
    gathered = max(ahead, begun + moved.gather_forward_s)
    asked = back + done.host.backward + done.host.again
    rows = (
        ("host", "pictures", 0.0, pictures_s),
        ("host", "begin", pictures_s, begun),
        ("network", "gather weights", begun, gathered),
        ("GPU", "forward", ahead, back),
        ("host", "forward", ahead, ahead + done.host.forward),
        ("GPU", "backward", back, end),
        ("host", "backward", back, asked),
        ("network", "gather weights", back, back + moved.gather_backward_s),
        ("network", "sum gradients", summed - moved.reduce_s, summed),
        ("host link", "gradients", summed, sent),
        ("GPU", "add gradients", sent, micro),
        ("network", "sum gradients", micro, whole),
        ("host", "finish", whole, told),
        ("host" if moved.cpu_step_s else "GPU", "optimizer", told, updated),
        ("host link", "weights", updated, back_up),
        ("network", "gather weights", back_up, back_up + moved.gather_step_s),
    )
    spans = (Span(lane=lane, name=name, begin_s=begin, end_s=end) for lane, name, begin, end in rows)
    return tuple(span for span in spans if span.end_s - span.begin_s > 1e-9), micro
