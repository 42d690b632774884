"""Keys of a DeepSpeed 0.19.8 configuration, by what becomes of them here. A test compares them with DeepSpeed's own."""

from __future__ import annotations

from launcher.planning.zero_kinds import KINDS, ZERO

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Handed on as they are: sharding, communication, measuring.
PASSED_KEYS = (
    "zero_optimization",
    "data_types",
    "communication_data_type",
    "aio",
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "disable_python_gc",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "comet",
)
# Decided by keys of the launcher: a value that says the same is dropped, another one is a problem.
OWNED_KEYS = ("optimizer", "scheduler", "gradient_clipping", "bf16", "fp16")
# What the launcher does itself or cannot do: (why, what to type). Dropped where it asks for nothing.
REFUSED_KEYS = {
    "activation_checkpointing": (
        "it acts on DeepSpeed's own checkpoint function, which no Qwen model calls",
        "memory.gradient_checkpointing=all",
    ),
    "managed_gradient_accumulation": ("the training loop sets the accumulation boundary", "batch.global_size=16"),
    "gradient_allreduce_op": ("the launcher scales losses for a mean over ranks", "loss=pointwise"),
    "prescale_gradients": ("the launcher scales losses itself, and stage 3 refuses it", "remove the key"),
    "gradient_predivide_factor": ("the launcher scales losses itself, and stage 3 refuses it", "remove the key"),
    "tensor_parallel": (
        "AutoTP splits the attention of Qwen's vision towers so that its shapes no longer fit, changes the losses of "
        "text models and fails with adapters; stage 3 shards the weights",
        "zero=stage3",
    ),
    "torch_autocast": ("precision=bf16 casts the weights once, not at every use", "precision=bf16"),
    "compile": (
        "DeepCompile acts after engine.compile() alone, and not where the loop sets the accumulation boundary",
        "remove the key",
    ),
    "sequence_parallel_size": ("a query with its documents stays on one rank", "batch.max_tokens=8192"),
    "expert_parallel": ("experts are sharded like other weights", "zero=stage3"),
    "pipeline": ("layers are not spread over ranks", "zero=stage3"),
    "data_efficiency": ("it acts in DeepSpeed's own loader, which this trainer does not use", "batch.max_tokens=8192"),
    "autotuning": ("the plan weighs settings without running them", "zero=auto"),
    "hybrid_engine": ("it serves models between steps, which no task here does", "remove the key"),
    "weight_quantization": ("it quantises for serving", "tune=qlora"),
    "datastates_ckpt": ("checkpoints are the launcher's own", "checkpoint.every_steps=500"),
}
# Harmless, and without effect here: dropped with a notice.
UNUSED_KEYS = {
    "checkpoint": "checkpoint.* decides, and the form is the launcher's own",
    "dataloader_drop_last": "rows come from the launcher's own loader",
    "disable_allgather": "DeepSpeed reads it nowhere",
    "log_level": "ranks log as the launcher asks",
    "seq_parallel_communication_data_type": "there is no sequence parallelism here",
    "steps_per_print": "logging.every_steps decides",
    "timers": "the launcher measures itself",
    "use_data_before_expert_parallelism": "there is no expert parallelism here",
    "vocabulary_size": "it only warns",
    "zero_allow_untested_optimizer": "the launcher sets it for torch's AdamW",
    "zero_force_ds_cpu_optimizer": "the launcher sets it for torch's AdamW",
}
DATA_TYPES = ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")
FORMATS = ("fp32", "bf16", "fp16")
# As DeepSpeed spells them in runtime/config.py DtypeEnum.
FORMAT_NAMES = {
    "float32": "fp32", "torch.float32": "fp32", "float": "fp32", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "float16": "fp16", "torch.float16": "fp16", "half": "fp16",
}  # fmt: skip
# Arguments that DeepSpeedEngine._configure_zero_optimizer gives to one of its optimizers alone: tuning without effect
# in other stages.
STAGE_3_ONLY = (
    "log_trace_cache_warnings", "memory_efficient_linear", "override_module_apply", "pipeline_loading_checkpoint",
    "stage3_allgather_sequential", "stage3_gather_16bit_weights_on_model_save", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_model_persistence_threshold", "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size", "leaf_module",
)  # fmt: skip
BELOW_3_ONLY = (
    "allgather_partitions", "ignore_unused_parameters", "parameter_alignment", "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
)  # fmt: skip
ZERO_KEYS = tuple(KINDS[ZERO])
BF16_KEYS = tuple(KINDS["bf16"])
FP16_ONLY = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "auto_cast")
FP16_KEYS = tuple(KINDS["fp16"])
# What an offload to one device reads; the rest has no effect there.
NVME_ONLY = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init")
OPTIMIZERS = ("AdamW", "Adam")
OPTIMIZER_PARAMS = (
    "lr", "betas", "eps", "weight_decay", "max_grad_norm", "adam_w_mode", "amsgrad", "bias_correction", "capturable",
    "differentiable", "foreach", "fp32_optimizer_states", "fused", "maximize", "set_grad_none", "torch_adam",
)  # fmt: skip
# What torch's AdamW does: another value asks for another optimizer.
OPTIMIZER_CHOICES = {"adam_w_mode": True, "amsgrad": False, "bias_correction": True, "maximize": False}
# DeepSpeed's schedules and what comes nearest to each here.
SCHEDULES = {
    "WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "OneCycle": "cosine",
    "LRRangeTest": "linear",
}  # fmt: skip
# Optimizers that DeepSpeed no longer has.
REMOVED_OPTIMIZERS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
