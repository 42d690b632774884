"""What a plan foretells about a run: bytes, seconds, and the settings that were weighed. Values that survive JSON.

Standard library only: `launcher.planning` computes them, RunPlan carries them, reports and ranks read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Parts of MemoryEstimate.gpu that torch's allocator does not hold as tensors.
CONTEXT = "CUDA context and NCCL"
FRAGMENTS = "fragmentation"
_BY_TOKENS = ("activations", "logits", "working memory")


def grows_with_tokens(part: str) -> bool:
    """Whether a part of MemoryEstimate.gpu depends on what a micro-batch holds; the others are there before it.

    Example:
        >>> grows_with_tokens("activations of the language model"), grows_with_tokens("frozen weights")
        (True, False)
    """
    return part.startswith(_BY_TOKENS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A micro-batch (or a whole step) in the numbers that memory and time depend on."""

    tokens: int  # packed tokens, a shared prefix once
    visual: int = 0  # of them visual tokens, after the merger
    patches: int = 0  # patches that the vision tower sees, each distinct image once
    key_rows: int = 0  # rows gathered as keys by attention; 0 = no prefix is shared, keys are used in place
    documents: int = 1  # prompts: attention's segments, each with one scored token
    answers: int = 0  # task=sft: tokens whose prediction is in the loss
    pairs: float = 0.0  # (query, key) pairs attended in one layer with full attention
    patch_pairs: float = 0.0  # pairs of patches attended in one vision block with full attention


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes by part at the fullest moment of training."""

    gpu: dict[str, int]  # of one GPU (or CPU rank); the sum is what nvidia-smi would show
    moment: str  # when that is: loading | forward | backward | optimizer
    host: dict[str, int] = field(default_factory=dict)  # main memory of one host, all of its ranks
    disk: dict[str, int] = field(default_factory=dict)  # of the run folder, and of each host for NVMe offload

    @property
    def total(self) -> int:
        """Bytes of the whole GPU."""
        return sum(self.gpu.values())

    @property
    def reserved(self) -> int:
        """torch.cuda.max_memory_reserved()."""
        return self.total - self.gpu.get(CONTEXT, 0)

    @property
    def allocated(self) -> int:
        """torch.cuda.max_memory_allocated()."""
        return self.reserved - self.gpu.get(FRAGMENTS, 0)


LANES = ("GPU", "network", "host link", "host")  # of a timeline, from top to bottom


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that happens during a step, for its timeline."""

    lane: str  # one of LANES
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """Seconds of an average optimizer step."""

    step_s: float
    parts: dict[str, float]  # seconds by part, what is hidden behind computing left out; the sum is step_s
    bound: str  # compute | network | host link | host | data: what the step waits for most
    tokens_per_s: float  # of all ranks
    queries_per_s: float
    flops: float  # of all ranks, that the step needs (recomputing not counted)
    least_s: float  # those FLOPs at the highest rate that matrix products reach on this kind of GPU
    rates: str  # a sentence: where the rates of GPU and network come from
    load: str  # a sentence: where the lengths come from
    micro_steps: int = 1  # micro-batches of a rank in a step
    micro_s: float = 0.0  # seconds of one; what else step_s holds comes once a step
    compute_bound_tokens: int | None = None  # tokens a GPU and micro-batch above which ZeRO-3 hides its gathers
    timeline: tuple[Span, ...] = ()  # of one micro-step and the optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A setting that was weighed."""

    zero: str
    checkpointed_layers: int
    max_tokens: int
    gpu_bytes: int
    step_s: float | None
    fits: bool
    verdict: str  # "chosen", or why it lost


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The same run on another number of GPUs."""

    gpus: int
    zero: str
    fits: bool
    gpu_bytes: int
    host_bytes: int = 0  # main memory of a host
    step_s: float | None
    epoch_hours: float | None  # None while rows are not counted
    epoch_gpu_hours: float | None
