"""Keys of a DeepSpeed 0.19.8 configuration, by what becomes of them here. A test compares them with DeepSpeed's own."""

from __future__ import annotations

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
    "steps_per_print",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
# Decided by keys of the launcher: a value that says the same is dropped, another one is a problem.
OWNED_KEYS = ("optimizer", "scheduler", "gradient_clipping", "bf16", "fp16")
REFUSED_KEYS = {
    "activation_checkpointing": "memory.gradient_checkpointing=all",
    "managed_gradient_accumulation": "batch.global_size=16",
    "gradient_allreduce_op": "loss=pointwise",
    "tensor_parallel": "zero=stage3",
    "torch_autocast": "precision=bf16",
}
# Seen with DeepSpeed 0.19.8 and two ranks. Its ranks that share a layer also need the same rows, and checkpoints and
# exports would hold one rank's part of each weight.
WHY_REFUSED = {
    "tensor_parallel": "AutoTP splits the attention of Qwen's vision towers so that its shapes no longer fit, changes "
    "the losses of text models and fails with adapters; stage 3 shards the weights",
}
ZERO_KEYS = (
    "allgather_bucket_size",
    "allgather_partitions",
    "compute_grad_norm",
    "contiguous_gradients",
    "elastic_checkpoint",
    "enable_sanity_checks",
    "ignore_unused_parameters",
    "leaf_module",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "offload_optimizer",
    "offload_param",
    "overlap_comm",
    "override_module_apply",
    "parameter_alignment",
    "pipeline_loading_checkpoint",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "save_muon_momentum_buffer_in_memory",
    "stage",
    "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
    "zenflow",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
)
BF16_KEYS = (
    "enabled",
    "check_grad_overflow",
    "immediate_grad_update",
    "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
)
FP16_ONLY = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "auto_cast")
FP16_KEYS = ("enabled", *FP16_ONLY, "consecutive_hysteresis", "fp16_master_weights_and_grads")
OFFLOAD_KEYS = (
    "device",
    "nvme_path",
    "pin_memory",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
    "ratio",
    "super_offload",
    "cpuadam_cores_perc",
)
OPTIMIZERS = ("AdamW", "Adam")
