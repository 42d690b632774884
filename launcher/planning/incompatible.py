"""What does not go together in one run: a table, a row for each, with where it is known from.

`seen` in a source means: run with DeepSpeed 0.19.8 on the CPU, two ranks, as tests/test_zero.py does. Files without a
repository are DeepSpeed's, by what stands in them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import Problem
from launcher.planning.consistency import uses_lora
from launcher.spec import RunConfig

ZERO = "zero_optimization"
OFFLOAD = ("cpu", "nvme")
LOW = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """What the rows look at: a finished DeepSpeed configuration and the settings beside it."""

    stage: int
    precision: str  # bf16 | fp16 | fp32
    device: str  # cuda | cpu
    hosts: int
    tune: str  # tune.name
    lora: bool
    dora: bool
    optim: str  # optim.name
    lr: str
    offload: str  # optimizer states: none | cpu | nvme
    offload_param: str
    overlap: bool
    master16: str  # format of 16-bit master weights, or none
    states16: bool  # Adam's moments in bf16
    sums: str  # format in which gradients add up
    qwz: bool
    qgz: bool
    qnt: bool  # frozen weights kept quantised
    part: bool  # a ratio of the states is offloaded
    superchip: bool  # super_offload
    zenflow: bool
    norm: bool  # gradient norms are computed
    elastic: bool
    autotp: bool
    long: bool  # a rank's part of what trains has more than 2^31 - 1 values


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that does not go together; `when` names the values of Combination under which it is so."""

    name: str
    when: Mapping[str, tuple[Any, ...]]
    text: str  # with fields of Combination in braces
    source: str
    tries: tuple[str, ...] = ()
    key: str = ""  # of the DeepSpeed configuration, for the line it stands in
    warning: bool = False  # it runs, and is told

    def holds(self, found: Combination) -> bool:
        """Whether this run is such a one."""
        return all(getattr(found, field_name) in values for field_name, values in self.when.items())


ROWS = (
    Row(
        name="low precision in stage 0",
        when={"stage": (0,), "precision": LOW},
        text="zero stage 0 in {precision} would add up gradients in {precision}: DeepSpeed offers float32 sums from "
        "stage 1 on",
        source="runtime/engine.py _do_optimizer_sanity_check",
        tries=("zero=stage1", "precision=fp32"),
        key=f"{ZERO}.stage",
    ),
    Row(
        name="qlora in stage 3",
        when={"stage": (3,), "tune": ("qlora",)},
        text="tune=qlora with zero stage 3: every GPU would hold all of the 4-bit weights, since they are not sharded",
        source="deepspeedai/DeepSpeed#5819, huggingface/peft#2016",
        tries=("zero=stage2", "tune=lora"),
        key=f"{ZERO}.stage",
    ),
    Row(
        name="dora in stage 3",
        when={"stage": (3,), "dora": (True,), "lora": (True,)},
        text="tune.use_dora=true needs whole weight matrices for their lengths, and zero stage 3 keeps them sharded",
        source="peft/tuners/lora/dora.py get_weight_norm",
        tries=("zero=stage2", "tune.use_dora=false"),
        key=f"{ZERO}.stage",
    ),
    Row(
        name="overlap below stage 2",
        when={"stage": (0, 1), "overlap": (True,)},
        text="overlap_comm is switched off: in stage {stage} it fails when the loop sets the accumulation boundary",
        source="runtime/engine.py _do_sanity_check",
        key=f"{ZERO}.overlap_comm",
        warning=True,
    ),
    Row(
        name="overlap in stage 2",
        when={"stage": (2,), "overlap": (True,)},
        text="overlap_comm in stage 2 has given NaN and wrong gradients to some; it is off in ds_configs/",
        source="deepspeedai/DeepSpeed#5347, #5294, #7804",
        key=f"{ZERO}.overlap_comm",
        warning=True,
    ),
    Row(
        name="states offloaded in stage 0",
        when={"stage": (0,), "offload": OFFLOAD},
        text="zero_optimization.offload_optimizer needs stage 1, and the stage is {stage}",
        source="runtime/zero/offload_config.py",
        tries=("zero=stage2_offload",),
        key=f"{ZERO}.offload_optimizer",
    ),
    Row(
        name="states on nvme below stage 3",
        when={"stage": (1, 2), "offload": ("nvme",)},
        text="zero_optimization.offload_optimizer to nvme needs stage 3: in stage {stage} the states would stay in "
        "host memory",
        source="runtime/zero/stage_1_and_2.py knows no swapper",
        tries=("zero=stage3_nvme", "zero=stage2_offload"),
        key=f"{ZERO}.offload_optimizer",
    ),
    Row(
        name="weights offloaded below stage 3",
        when={"stage": (0, 1, 2), "offload_param": OFFLOAD},
        text="zero_optimization.offload_param needs stage 3, and the stage is {stage}",
        source="seen: accepted, and the weights stay",
        tries=("zero=stage3_offload",),
        key=f"{ZERO}.offload_param",
    ),
    Row(
        name="weights on nvme",
        when={"stage": (3,), "offload_param": ("nvme",), "precision": ("bf16", "fp32")},
        text="weights on nvme come back as float16, and this run computes in {precision}",
        source="seen: Half against BFloat16 in the first layer; runtime/swap_tensor/partitioned_param_swapper.py "
        "invalid_buffer",
        tries=(
            "zero=stage3_nvme zero.nvme_path=FOLDER   (weights in host memory)",
            '"offload_param": {"device": "cpu"}',
        ),
        key=f"{ZERO}.offload_param",
    ),
    Row(
        name="part of the states",
        when={"part": (True,)},
        text="offload_optimizer.ratio below 1 needs DeepSpeedCPUAdam in stage 3, and this trainer uses torch's AdamW",
        source="runtime/zero/stage3.py, Hybrid Optimizer; runtime/zero/config.py offload_ratio_check",
        tries=('"ratio": 1.0', "zero=stage3_offload"),
        key=f"{ZERO}.offload_optimizer.ratio",
    ),
    Row(
        name="super offload",
        when={"superchip": (True,)},
        text="super_offload has no effect below stage 3, and there needs DeepSpeedCPUAdam and a GPU that shares its "
        "host's memory",
        source="runtime/engine.py, SuperOffloadOptimizer_Stage3; seen: ignored in stage 2",
        tries=('"super_offload": false',),
        key=f"{ZERO}.offload_optimizer.super_offload",
    ),
    Row(
        name="zenflow",
        when={"zenflow": (True,)},
        text="zenflow needs its own CPU optimizer, and crashes with Qwen-VL models",
        source="runtime/zenflow; seen in stage 2: start (182) + length (307) exceeds dimension size",
        tries=("zero=stage2_offload", "zero=stage3_offload"),
        key=f"{ZERO}.zenflow",
    ),
    Row(
        name="bf16 masters in another precision",
        when={"master16": ("bf16",), "precision": ("fp16", "fp32")},
        text="master weights in bfloat16 need precision=bf16, and this run computes in {precision}",
        source="runtime/base_optimizer.py _configure_master_weights",
        tries=("precision=bf16", "zero=stage{stage}"),
        key="bf16",
    ),
    Row(
        name="bf16 masters without bf16 states",
        when={"master16": ("bf16",), "states16": (False,)},
        text="bf16.bf16_master_weights_and_grads without bf16_optimizer_states needs DeepSpeedCPUAdam, and this "
        "trainer uses torch's AdamW",
        source="runtime/base_optimizer.py _configure_master_weights",
        tries=("zero=stage2_bf16_states", "zero=stage3_bf16_states"),
        key="bf16.bf16_master_weights_and_grads",
    ),
    Row(
        name="bf16 states without bf16 masters",
        when={"master16": ("none", "fp16"), "states16": (True,)},
        text="bf16.bf16_optimizer_states needs bf16_master_weights_and_grads",
        source="runtime/config.py _do_error_check",
        tries=('"bf16_master_weights_and_grads": true', "zero=stage2_bf16_states"),
        key="bf16.bf16_optimizer_states",
    ),
    Row(
        name="bf16 states offloaded",
        when={"master16": ("bf16",), "offload": OFFLOAD},
        text="bfloat16 master weights in host memory need DeepSpeedCPUAdam, and this trainer uses torch's AdamW",
        source="runtime/base_optimizer.py _configure_master_weights",
        tries=("zero=stage{stage}_offload", "zero=stage{stage}_bf16_states"),
        key="bf16.bf16_master_weights_and_grads",
    ),
    Row(
        name="fp16 masters",
        when={"master16": ("fp16",)},
        text="fp16.fp16_master_weights_and_grads needs DeepSpeedCPUAdam, and this trainer uses torch's AdamW",
        source="runtime/base_optimizer.py _configure_master_weights",
        tries=("remove the key",),
        key="fp16.fp16_master_weights_and_grads",
    ),
    Row(
        name="bf16 states of 8 bits",
        when={"states16": (True,), "optim": ("adamw8bit",)},
        text="bf16.bf16_optimizer_states with optim=adamw8bit: its moments have 8 bits already",
        source="launcher/training/engine_state.py; not run",
        tries=("optim=adamw", "zero=stage{stage}"),
        key="bf16.bf16_optimizer_states",
    ),
    Row(
        name="8-bit moments of more than 2^31 values",
        when={"optim": ("adamw8bit",), "stage": (1, 2), "long": (True,)},
        text="optim=adamw8bit: bitsandbytes counts the values of a tensor in 31 bits, and a rank's part of the weights "
        "that train is one tensor of more",
        source="seen on one H200: 'invalid argument' in csrc/ops.cu with 4.0e9 values, bitsandbytes 0.50.2",
        tries=("optim=adamw", "zero=stage3", "more GPUs"),
    ),
    Row(
        name="bf16 states lose updates",
        when={"master16": ("bf16",), "states16": (True,)},
        text="master weights in bfloat16 lose every update smaller than 1/256 to 1/512 of its weight: at a learning "
        "rate of {lr} those of most weights",
        source="bfloat16 has 8 bits of precision; held by tests/test_zero.py",
        key="bf16.bf16_master_weights_and_grads",
        warning=True,
    ),
    Row(
        name="bf16 states of adapters",
        when={"master16": ("bf16",), "states16": (True,), "lora": (True,)},
        text="bf16 states save 8 bytes for each parameter that trains, and adapters are few: zero=stage{stage} costs "
        "little more and is exact",
        source="arithmetic",
        key="bf16.bf16_optimizer_states",
        warning=True,
    ),
    Row(
        name="sums in 16 bits",
        when={"stage": (1, 2, 3), "sums": LOW, "master16": ("none",)},
        text="data_types.grad_accum_dtype is {sums}: gradients of many micro-batches add up with 8 to 11 bits",
        source="runtime/engine.py get_data_types",
        key="data_types.grad_accum_dtype",
        warning=True,
    ),
    Row(
        name="quantised weights below stage 3",
        when={"stage": (0, 1, 2), "qwz": (True,)},
        text="zero_optimization.zero_quantized_weights has no effect below stage 3, and the stage is {stage}",
        source="runtime/engine.py _configure_zero_optimizer",
        tries=("zero=zeropp", "zero=stage3"),
        key=f"{ZERO}.zero_quantized_weights",
    ),
    Row(
        name="quantised gradients below stage 3",
        when={"stage": (0, 1, 2), "qgz": (True,)},
        text="zero_optimization.zero_quantized_gradients has no effect below stage 3, and the stage is {stage}",
        source="seen: accepted; runtime/engine.py _configure_zero_optimizer",
        tries=("zero=zeropp", "zero=stage3"),
        key=f"{ZERO}.zero_quantized_gradients",
    ),
    Row(
        name="quantised frozen weights below stage 3",
        when={"stage": (0, 1, 2), "qnt": (True,)},
        text="zero_optimization.zero_quantized_nontrainable_weights has no effect below stage 3, and the stage is "
        "{stage}",
        source="runtime/engine.py _configure_zero_optimizer",
        tries=("tune=qlora", "zero=stage3"),
        key=f"{ZERO}.zero_quantized_nontrainable_weights",
    ),
    Row(
        name="quantised frozen weights in another precision",
        when={"stage": (3,), "qnt": (True,), "precision": ("bf16", "fp32")},
        text="zero_quantized_nontrainable_weights takes float16 weights alone, and this run computes in {precision}",
        source="runtime/zero/stage3.py quantize_dstensor",
        tries=("precision=fp16", "tune=qlora zero=stage2"),
        key=f"{ZERO}.zero_quantized_nontrainable_weights",
    ),
    Row(
        name="quantised gradients in another precision",
        when={"stage": (3,), "qgz": (True,), "precision": ("bf16", "fp32")},
        text="zero_quantized_gradients reads the bits of every gradient as float16, and these are in {precision}",
        source="csrc/quantization/pt_binding.cpp ds_swizzle_quant; runtime/comm/coalesced_collectives.py",
        tries=("precision=fp16", "zero=stage3_hpz"),
        key=f"{ZERO}.zero_quantized_gradients",
    ),
    Row(
        name="quantised gradients on one host",
        when={"stage": (3,), "qgz": (True,), "hosts": (1,)},
        text="zero_quantized_gradients acts between hosts, and this run has one",
        source="runtime/zero/stage3.py __avg_scatter_grads, num_nodes",
        tries=("zero=stage3",),
        key=f"{ZERO}.zero_quantized_gradients",
    ),
    Row(
        name="quantised weights on the cpu",
        when={"device": ("cpu",), "qwz": (True,)},
        text="zero_quantized_weights has kernels for GPUs alone",
        source="runtime/zero/partition_parameters.py CUDAQuantizer",
        tries=("zero=stage3",),
        key=f"{ZERO}.zero_quantized_weights",
    ),
    Row(
        name="quantised gradients on the cpu",
        when={"device": ("cpu",), "qgz": (True,)},
        text="zero_quantized_gradients has kernels for GPUs alone",
        source="runtime/comm/coalesced_collectives.py QuantizerBuilder",
        tries=("zero=stage3",),
        key=f"{ZERO}.zero_quantized_gradients",
    ),
    Row(
        name="no gradient norm",
        when={"norm": (False,)},
        text="zero_optimization.compute_grad_norm is false, and gradients are clipped by their norm",
        source="runtime/zero/config.py compute_grad_norm_valid; ValueError with gradient_clipping",
        tries=("remove the key",),
        key=f"{ZERO}.compute_grad_norm",
    ),
    Row(
        name="elastic checkpoint",
        when={"elastic": (True,)},
        text="elastic_checkpoint has no effect: checkpoints are the launcher's own, and resume on any number of ranks",
        source="launcher/training/checkpoint.py; in stage 3 DeepSpeed warns, then fails",
        tries=("remove the key",),
        key=f"{ZERO}.elastic_checkpoint",
    ),
    Row(
        name="tensor parallelism",
        when={"autotp": (True,)},
        text="tensor_parallel (AutoTP) splits the attention of Qwen's vision towers so that its shapes no longer fit, "
        "changes the losses of text models and fails with adapters",
        source="seen: two ranks, stages 0 to 2",
        tries=("zero=stage3   (shards the weights)", "zero=stage3_offload"),
        key="tensor_parallel",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the table says of a run."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def combination(
    deepspeed: Mapping[str, Any],
    config: RunConfig,
    *,
    precision: str,
    device: str,
    hosts: int,
    lr: float,
    own_values: int,
) -> Combination:
    """The values that the rows look at; `deepspeed` is a whole configuration, `own_values` train on one rank."""
    zero = deepspeed[ZERO]
    states, weights = zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}
    bf16, fp16 = deepspeed.get("bf16", {}), deepspeed.get("fp16", {})
    stage = zero["stage"]
    half = "bf16" if bf16.get("bf16_master_weights_and_grads") else "none"
    overlap = zero.get("overlap_comm")
    return Combination(
        stage=stage,
        precision=precision,
        device=device,
        hosts=hosts,
        tune=config.tune.name,
        lora=uses_lora(config.tune),
        dora=config.tune.use_dora,
        optim=config.optim.name,
        lr=f"{lr:g}",
        offload=states.get("device", "none"),
        offload_param=weights.get("device", "none"),
        overlap=stage == 3 if overlap is None else bool(overlap),
        master16="fp16" if fp16.get("fp16_master_weights_and_grads") else half,
        states16=bool(bf16.get("bf16_optimizer_states")),
        sums=deepspeed.get("data_types", {}).get("grad_accum_dtype", "fp32"),
        qwz=bool(zero.get("zero_quantized_weights")),
        qgz=bool(zero.get("zero_quantized_gradients")),
        qnt=bool(zero.get("zero_quantized_nontrainable_weights")),
        part=states.get("device", "none") != "none" and states.get("ratio", 1) < 1,
        superchip=bool(states.get("super_offload")),
        zenflow=zero.get("zenflow") is not None,
        norm=zero.get("compute_grad_norm", True) is not False,
        elastic=bool(zero.get("elastic_checkpoint")),
        autotp=deepspeed.get("tensor_parallel", {}).get("autotp_size", 0) not in (0, 1),
        long=own_values > 2**31 - 1,
    )


def judge(found: Combination, where: Callable[[str], str]) -> Found:
    """Rows that hold; `where` gives the file, and the line if there is one, that sets a key."""
    values = dataclasses.asdict(found)
    result = Found()
    for row in ROWS:
        if not row.holds(found):
            continue
        text = row.text.format(**values)
        if row.warning:
            result.warnings.append(text)
        else:
            tries = tuple(line.format(**values) if "{stage}" in line else line for line in row.tries)
            result.problems.append(Problem(text, where(row.key), tries))
    return result
