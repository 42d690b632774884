"""What was asked (RunConfig) and what will happen (RunPlan): frozen values that survive JSON.

Standard library only: both planes and the agent read these. The RunConfig classes are the schema that
`launcher.planning.config` holds what Hydra composed against; allowed values are checked there too.
Every key's meaning is the comment beside it in `conf/`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.estimates import Choice, Scale, TimeEstimate
from launcher.plain import from_data, to_data

MISSING = "???"  # OmegaConf's mark for a value that must be given
# What eval.metric may name; the first is meant by auto.
METRICS_OF_TASK = {
    "rerank": ("ndcg@10", "mrr@10", "recall@1", "recall@5", "loss"),
    "sft": ("loss",),
    "classify": ("accuracy", "loss"),
}
LOWER_IS_BETTER = ("loss", "perplexity")


def is_better(metric: str, value: float | None, other: float | None) -> bool:
    """Whether `value` of an evaluation metric is better than `other`; any number is better than none.

    Example:
        >>> is_better("loss", 1.0, 2.0), is_better("ndcg@10", 1.0, 2.0), is_better("loss", math.nan, None)
        (True, False, False)
    """
    if value is None or math.isnan(value):
        return False
    if other is None or math.isnan(other):
        return True
    return value < other if lower_is_better(metric) else value > other


def lower_is_better(metric: str) -> bool:
    """Whether an evaluation metric, or a number of a sweep, is the better the smaller it is."""
    return metric.removeprefix("eval/") in LOWER_IS_BETTER


def metric_of(config: Mapping[str, Any]) -> str:
    """RunConfig.metric of a configuration in JSON's form, as in plan.json, where keys may be missing."""

    def value(group: str, key: str) -> str:
        found = config.get(group)
        return str(found.get(key, "auto")) if isinstance(found, Mapping) else "auto"

    metric = value("eval", "metric")
    own = METRICS_OF_TASK.get(value("task", "name"), METRICS_OF_TASK["rerank"])
    return own[0] if metric == "auto" else metric


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where the run lives."""

    root: str = "runs"
    name: str | None = None
    dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model. `arch` has config.json's own structure; a local `path` replaces it."""

    name: str = MISSING
    family: str = MISSING
    repo: str | None = None
    path: str | None = None
    source: str = "hf"  # hf | modelscope: where `repo` is fetched from
    weights: str = "pretrained"  # pretrained | random
    adapter: str | None = None  # folder of LoRA weights to start from
    min_pixels: int | None = None
    max_pixels: int | None = None
    arch: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """How a video becomes frames, and how the scores of its segments become one."""

    fps: float = 1.0
    min_frames: int = 4
    max_frames: int = 64
    max_pixels: int = 786432  # of one frame
    total_pixels: int = 7864320  # of all frames of a segment
    segment_s: float | None = None  # null = the whole video is one segment
    fuse: str = "max"  # max | mean | top_k | logistic
    top_k: int = 3


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Which rows, and what is done with them before a model sees them."""

    name: str = MISSING
    format: str = "auto"  # auto | a name of launcher.training.formats.FORMATS | pkg.mod:function
    source: str = "hf"  # hf | modelscope: where names of a hub are fetched from
    train: Any = None  # file, folder or hub name, or a list of them
    eval: Any = None
    weights: list[float] | None = None  # share of each train source in an epoch
    subset: str | None = None
    split: str | None = None
    eval_split: str | None = None
    eval_fraction: float = 0.0
    columns: dict[str, str] = field(default_factory=dict)  # our key -> their column
    image_root: str | None = None
    max_length: int = 4096
    over_long: str = "drop"  # drop | shrink
    max_rows: int | None = None
    max_positives: int | None = None
    max_negatives: int | None = None
    random_negatives: int = 0
    min_pixels: int | None = None
    max_pixels: int | None = None
    video: VideoOptions = field(default_factory=VideoOptions)
    on_bad: str = "error"  # error | skip
    max_bad_fraction: float = 0.1
    shuffle_labels: bool = False
    workers: int | None = None  # threads of a rank that decode and pack ahead; None: its processors but one

    def sources(self, split: str) -> tuple[str, ...]:
        """What `train` or `eval` names, one entry a source."""
        value = self.train if split == "train" else self.eval
        if value is None or value == MISSING:
            return ()
        return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the model learns to do."""

    name: str = MISSING  # rerank | sft | classify
    instruction: str | None = None  # rerank: what a query is asked with; None = as the family's rerankers are
    system: str | None = None  # sft, classify: the system message of rows without one
    classes: list[str] = field(default_factory=list)  # classify: names in the order of the head's rows


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Which loss of the task."""

    name: str = MISSING  # pointwise | listwise | pairwise | distill | cross_entropy | custom
    form: str = "ranknet"  # pairwise: ranknet | margin; distill: margin_mse | kl
    temperature: float = 1.0
    positive_weight: float = 1.0
    margin: float = 1.0
    function: str | None = None  # custom: pkg.mod:function
    unit: str = "document"  # custom: document | group, what the sum is divided by


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What trains: each part is frozen, lora or full."""

    name: str = MISSING  # lora | full | qlora
    language: str = "lora"
    vision: str = "frozen"
    projector: str = "frozen"
    head: str = "frozen"  # frozen | full
    r: int = 8
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    target_modules: str | None = None  # all-linear | qwen | regular expression over module names
    use_rslora: bool = False
    use_dora: bool = False
    double_quant: bool = True  # qlora: the quantisation constants are quantised too


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, and from which seed."""

    epochs: float = 3.0
    max_steps: int | None = None
    seed: int = 42
    deterministic: bool = False
    kernels: str = "auto"  # auto | fused | plain: how decoder layers are computed
    max_bad_steps: int = 10  # in a row: loss not finite, skipped, or exactly 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    name: str = "adamw"  # adamw | adamw8bit
    lr: float | None = None  # null = by tuning kind
    lr_language: float | None = None  # of one part; null = lr
    lr_vision: float | None = None
    lr_projector: float | None = None
    lr_head: float | None = None
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "cosine"  # linear | cosine | constant
    warmup_ratio: float = 0.05
    warmup_steps: int | None = None
    min_lr_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Two numbers are typed, the rest is derived."""

    global_size: int = 16  # queries an optimizer step
    max_tokens: Any = "auto"  # tokens of a micro-batch, or auto


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Which file of ds_configs/, or the user's own DeepSpeed JSON."""

    name: str = MISSING
    file: str = MISSING
    config: str | None = None
    nvme_path: str | None = None


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number format of the forward and backward pass."""

    name: str = "auto"  # auto | bf16 | fp16 | fp32
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention kernel of the language model."""

    name: str = "auto"  # auto | cudnn | flash_attention_4 | flash_attention_3 | flash_attention_2 | varlen | sdpa
    shared_prefix: bool = True


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is recomputed to save memory."""

    gradient_checkpointing: str = "auto"  # auto | all | none | number of layers
    headroom: float = 0.05  # share of a GPU's memory that a plan leaves free
    vision_cache_gib: float = 0.0  # main memory of each rank for features of images; 0 = none are kept


@dataclass(frozen=True, kw_only=True)
class NcclConfig:
    """How GPUs talk: a profile, and what only the fabric's keeper knows."""

    name: str = "auto"  # auto | nvlink | ib | roce | efa | gcp | tcp | pcie | debug
    force: bool = False  # keep variables that are known to do harm
    interface: str | None = None  # of every host, for sockets; null = the one whose route reaches the others
    hca: list[str] = field(default_factory=list)  # RDMA devices by exact name; [] = NCCL's own choice
    gid_index: int | None = None  # RoCE with NCCL before 2.21
    traffic_class: int | None = None  # RoCE: the switches' lossless class
    service_level: int | None = None  # InfiniBand
    cross_nic: int | None = None  # 0 on a rail-only fabric, 1 with all cards on one switch


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Which machines, and how long to be patient with them."""

    name: str = MISSING
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    transport: str = "auto"  # auto | local | ssh | env | manual | slurm | pdsh
    gpu: str | None = None
    python: str | None = None
    activate: str | None = None  # a script to source, and its arguments
    wrap: list[str] = field(default_factory=list)  # a command before Python, such as docker exec -i NAME
    sync: str = "check"  # check | rsync | none
    slurm_args: list[str] = field(default_factory=list)
    pdsh_args: list[str] = field(default_factory=list)
    master_addr: str | None = None
    master_port: int | None = None
    bind_cores: str = "auto"  # auto | none
    connect_s: float = 15.0
    stop_grace_s: float = 120.0
    lost_contact_s: float = 120.0
    hang_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When the held-out rows are scored, and which number decides."""

    metric: str = "auto"
    patience: int | None = None  # evaluations without a new best before training ends
    at_start: bool = True
    every_steps: int | None = 500


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is saved and what is kept."""

    every_steps: int | None = 500
    every_epoch: bool = False
    at_end: bool = True
    keep_last: int = 2
    keep_best: bool = True
    export: bool = True
    merge: bool = True  # of adapters, when exporting


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is written while it runs."""

    every_steps: int = 1
    monitor_every_s: float | None = 5.0  # null = no monitor
    trackers: list[str] = field(default_factory=list)  # wandb | mlflow | swanlab, beside TensorBoard
    project: str = "launcher"


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps of which ranks are looked at closely, and by what."""

    name: str = MISSING  # none | torch | nsys | deepspeed | comms
    first_step: int = 10
    steps: int = 3
    ranks: list[int] = field(default_factory=lambda: [0])


# Variables of the launching shell that ranks on every host get; a `*` stands for any letters.
FORWARDED = (
    *("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "MODELSCOPE_*", "WANDB_*", "MLFLOW_*", "SWANLAB_*"),
    *("NCCL_*", "UCX_*", "FI_*", "GLOO_*", "TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*", "TRITON_*", "CUDA_*", "CUBLAS_*"),
    *("OMP_*", "MKL_*", "DS_*", "DEEPSPEED_*", "PYTHON*", "LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CACHE_HOME"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Environment of every rank, literally: the launching shell's by pattern, then a file, then single values."""

    forward: list[str] = field(default_factory=lambda: list(FORWARDED))
    file: str | None = None
    set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RestartOptions:
    """What happens after a failure."""

    max: int = 0


@dataclass(frozen=True, kw_only=True)
class NotifyOptions:
    """Who is told how it ended."""

    command: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What a sweep (-m) does beside starting its jobs; without effect on a single run."""

    metric: str | None = None  # the table is sorted by it; null = eval.metric
    fail_fast: bool = False
    skip_invalid: bool = False


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that was asked: the schema of `conf/config.yaml`."""

    nodes: int | None = None
    gpus: Any = None  # a count or a list of slot numbers
    resume: str | None = None
    run: RunOptions = field(default_factory=RunOptions)
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    nccl: NcclConfig = field(default_factory=NcclConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sweep: SweepOptions = field(default_factory=SweepOptions)
    env: EnvConfig = field(default_factory=EnvConfig)
    restart: RestartOptions = field(default_factory=RestartOptions)
    notify: NotifyOptions = field(default_factory=NotifyOptions)

    @property
    def metric(self) -> str:
        """`eval.metric`, by task when it is auto."""
        return METRICS_OF_TASK[self.task.name][0] if self.eval.metric == "auto" else self.eval.metric

    @property
    def few_bits(self) -> tuple[str, ...]:
        """What was typed that bitsandbytes computes, on GPUs and on CPUs alike."""
        return tuple(
            ["tune=qlora"] * (self.tune.name == "qlora") + ["optim=adamw8bit"] * (self.optim.name == "adamw8bit")
        )

    @property
    def whole_groups(self) -> bool:
        """Whether the loss compares the documents of a query, which then stay in one micro-batch."""
        loss = self.loss
        return loss.name in ("listwise", "pairwise", "distill") or (loss.name == "custom" and loss.unit == "group")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of the run; `gpus` are slot numbers, on a CPU run one number a rank."""

    name: str
    gpus: tuple[int, ...]
    address: str | None = None
    port: int | None = None
    user: str | None = None
    iface: str | None = None
    weight: float | str | None = None  # relative speed of its GPUs, or "auto": all ranks of the run are measured
    weights: tuple[float, ...] | None = None  # one for each of gpus, in place of weight

    @property
    def slots(self) -> int:
        """Ranks on this host."""
        return len(self.gpus)

    def taking(self, gpus: Mapping[int, int]) -> Host:
        """The host with some of its GPUs: their slots -> their numbers from now on."""
        kept = sorted((new, old) for old, new in gpus.items())
        weights = self.weights
        if weights is not None:
            weights = tuple(weights[self.gpus.index(old)] for _, old in kept)
        return replace(self, gpus=tuple(new for new, _ in kept), weights=weights)

    def speeds(self, first_rank: int) -> list[float]:
        """Relative speeds in the order of its ranks: DeepSpeed gives each rank slot `rank % slots`."""
        alike = self.weight if isinstance(self.weight, float) else 1.0
        weights = self.weights or (alike,) * self.slots
        return [weights[(first_rank + n) % self.slots] for n in range(self.slots)]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Batch arithmetic; counts that depend on unmeasured lengths or unread rows are None."""

    global_size: int  # queries an optimizer step
    max_tokens: int  # tokens of a micro-batch
    train_rows: int | None
    eval_rows: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    micro_steps: int | None  # micro-batches a rank and step, an estimate


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Relative cost of a packed sequence, used to balance micro-batches over ranks.

    cost = token * tokens + token_pair * attended (query, key) pairs + patch * patches
    + patch_pair * patches attended per patch; units are FLOPs of a forward pass.
    """

    token: float
    token_pair: float
    patch: float
    patch_pair: float


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything that will happen. Ranks read this and nothing else."""

    run_id: str
    created_at: str  # ISO 8601, UTC
    version: str  # of the launcher
    run_dir: str  # absolute
    resume_from: str | None  # absolute path of a COMPLETE checkpoint
    config: RunConfig
    hosts: tuple[Host, ...]
    hosts_source: str  # a sentence: where the hosts came from
    hosts_assumed: bool  # true: planning only, nothing can start
    transport: str  # local | ssh | env | manual | slurm | pdsh
    device: str  # cuda | cpu
    gpu_kind: str | None
    master_addr: str
    master_port: int | None
    precision: str  # bf16 | fp16 | fp32
    precision_reason: str
    attention: str  # a name of conf/attention, or reference
    attention_reason: str
    checkpointed_layers: int  # decoder layers recomputed in the backward pass
    lr: float
    warmup_steps: int | None  # None while total_steps is unknown
    arch: dict[str, Any]  # config.json of the model, or the table's copy of it
    parameters: dict[str, int]  # by part
    trainable: dict[str, int]  # by part
    batch: BatchPlan
    cost: CostModel
    deepspeed: dict[str, Any]
    memory: dict[str, int]  # MemoryEstimate.gpu: bytes of a GPU (or a CPU rank) by part at the fullest moment
    env: dict[str, str]  # what every rank gets
    host_env: dict[str, dict[str, str]]  # what the ranks of a host get on top: what differs by host
    cores: dict[str, tuple[tuple[int, ...], ...]]  # host -> processor numbers by local rank; empty: not bound
    commands: dict[str, tuple[str, ...]]  # host -> argv of its `deepspeed` line
    env_sources: dict[str, str] = field(default_factory=dict)  # launcher | nccl | forwarded | env.file | env.set
    env_reasons: dict[str, str] = field(default_factory=dict)  # variable of the launcher or of nccl -> why
    capability: tuple[int, int] | None = None  # CUDA compute capability of the oldest GPU; None = not known
    memory_moment: str = ""  # MemoryEstimate.moment
    memory_capacity: int | None = None  # bytes that a GPU has (or RAM for a CPU rank); None = not known
    host_memory: dict[str, int] = field(default_factory=dict)  # MemoryEstimate.host
    disk: dict[str, int] = field(default_factory=dict)  # MemoryEstimate.disk
    time: TimeEstimate | None = None  # None on CPU
    choices: tuple[Choice, ...] = ()  # what was weighed where a setting is auto; the chosen one first
    scaling: tuple[Scale, ...] = ()  # the same run on 1 to 16 GPUs
    data: dict[str, Any] = field(default_factory=dict)  # split -> summary of its rows, once they are prepared
    warnings: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return sum(host.slots for host in self.hosts)

    @property
    def layers(self) -> int:
        """Decoder layers of the model."""
        return int((self.arch.get("text_config") or self.arch)["num_hidden_layers"])

    @property
    def zero_name(self) -> str:
        """The `zero=` that is used: the one asked for, or what auto has chosen."""
        return self.choices[0].zero if self.config.zero.name == "auto" and self.choices else self.config.zero.name

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speed of each rank: its host's weight, 1 where none is given or it is to be measured."""
        found: list[float] = []
        for host in self.hosts:
            found += host.speeds(len(found))
        return tuple(found)

    @property
    def measures_speeds(self) -> bool:
        """Whether ranks measure their speeds when they start."""
        return any(host.weight == "auto" for host in self.hosts)


def plan_to_json(plan: RunPlan) -> str:
    """The plan as indented JSON text."""
    return json.dumps(to_data(plan), indent=2, ensure_ascii=False) + "\n"


def plan_from_json(text: str) -> RunPlan:
    """The plan that `plan_to_json` wrote."""
    plan: RunPlan = from_data(RunPlan, json.loads(text))
    return plan
