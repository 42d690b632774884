"""What people type by habit, from ms-swift, the Hugging Face Trainer and DeepSpeed, and our name for it.

Each entry is `OURS` or `OURS | a remark`. In OURS a `{}` takes the value that was typed; an entry without
`=` has no counterpart here and only the remark is shown.
"""

from __future__ import annotations

_STEP = (
    "batch.global_size=VALUE | "
    "batch.global_size counts the queries of an optimizer step: per device x accumulation x GPUs"
)

HABITS: dict[str, str] = {
    # optimizer and schedule
    "learning_rate": "optim.lr={}",
    "adam_epsilon": "optim.eps={}",
    "adam_beta1": "optim.betas=[{},0.999] | both betas are typed together",
    "adam_beta2": "optim.betas=[0.9,{}] | both betas are typed together",
    "gradient_clipping": "optim.max_grad_norm={}",
    "clip_grad": "optim.max_grad_norm={}",
    "lr_scheduler_type": "optim.schedule={}",
    "scheduler": "optim.schedule={}",
    "warmup_proportion": "optim.warmup_ratio={}",
    "optimizer": "optim={}",
    # how long
    "num_train_epochs": "train.epochs={}",
    "num_epochs": "train.epochs={}",
    "data_seed": "train.seed={} | one seed decides everything",
    "full_determinism": "train.deterministic={}",
    # batch
    "per_device_train_batch_size": _STEP,
    "train_micro_batch_size_per_gpu": _STEP,
    "micro_batch_size": _STEP,
    "gradient_accumulation_steps": _STEP,
    "train_batch_size": "batch.global_size={}",
    "batch_size": "batch.global_size={}",
    "per_device_eval_batch_size": "batch.max_tokens=auto | micro-batches are filled by tokens, in evaluation too",
    "packing": "batches are always packed",
    "padding_free": "batches are always packed, without padding",
    "group_by_length": "micro-batches are always filled by tokens and balanced over the ranks",
    "dataloader_num_workers": "rows are read and decoded without worker processes of your choosing",
    "dataset_num_proc": "rows are read and decoded without worker processes of your choosing",
    "dataloader_drop_last": "the last partial batch is always trained, exactly",
    "remove_unused_columns": "rows are read by their own format; extra columns do no harm",
    # what trains
    "lora_rank": "tune.r={}",
    "lora_r": "tune.r={}",
    "lora_target": "tune.target_modules={} | one regular expression over module names",
    "lora.target": "tune.target_modules={}",
    "lora.alpha": "tune.lora_alpha={}",
    "lora.dropout": "tune.lora_dropout={}",
    "target_regex": "tune.target_modules={}",
    "train_type": "tune={}",
    "tuner_type": "tune={}",
    "sft_type": "tune={}",
    "finetuning_type": "tune={}",
    "use_lora": "tune=lora",
    "use_peft": "tune=lora",
    "freeze_vit": "tune.vision={}",
    "freeze_vision_tower": "tune.vision={}",
    "freeze_aligner": "tune.projector={}",
    "freeze_multi_modal_projector": "tune.projector={}",
    "freeze_llm": "tune.language={}",
    "freeze_language_model": "tune.language={}",
    # model, data, task
    "model_name_or_path": "model={}",
    "model_id_or_path": "model={}",
    "model_id": "model={}",
    "model_type": "model={}",
    "train_file": "dataset=jsonl dataset.train={}",
    "train_dataset": "dataset=jsonl dataset.train={}",
    "data_path": "dataset=jsonl dataset.train={}",
    "val_dataset": "dataset.eval={}",
    "eval_dataset": "dataset.eval={}",
    "eval_file": "dataset.eval={}",
    "validation_file": "dataset.eval={}",
    "split_dataset_ratio": "dataset.eval_fraction={}",
    "cutoff_len": "dataset.max_length={}",
    "model_max_length": "dataset.max_length={}",
    "max_seq_length": "dataset.max_length={}",
    "max_seq_len": "dataset.max_length={}",
    "max_samples": "dataset.max_rows={}",
    "max_train_samples": "dataset.max_rows={}",
    "task_type": "task={}",
    "loss_type": "loss={}",
    "system": "task.instruction={} | the reranker's system prompt is fixed; the instruction is yours",
    # ZeRO, precision, memory
    "deepspeed": "zero={}",
    "deepspeed_config": "zero.config={}",
    "ds_config": "zero.config={}",
    "zero_stage": "zero={}",
    "zero.stage": "zero={}",
    "stage": "zero={}",
    "bf16": "precision=bf16",
    "fp32": "precision=fp32",
    "fp16": "precision=fp16",
    "torch_dtype": "precision={}",
    "dtype": "precision={}",
    "attn_impl": "attention={}",
    "attn_implementation": "attention={}",
    "use_flash_attn": "attention=auto",
    "flash_attn": "attention=auto",
    "use_gradient_checkpointing": "memory.gradient_checkpointing={}",
    "gradient_checkpointing": "memory.gradient_checkpointing={}",
    "activation_checkpointing": "memory.gradient_checkpointing={}",
    # machines
    "num_gpus": "gpus={}",
    "num_accelerators": "gpus={}",
    "nproc_per_node": "gpus={}",
    "num_processes": "gpus=VALUE | gpus counts the ranks of one host; num_processes counts those of all hosts",
    "gpus_per_node": "gpus={}",
    "gpu_ids": "gpus=[{}]",
    "cuda_visible_devices": "gpus=[{}]",
    "num_nodes": "nodes={}",
    "nnodes": "nodes={}",
    "num_machines": "nodes={}",
    "h": "cluster.hostfile={}",
    "i": "cluster.include={}",
    "e": "cluster.exclude={}",
    "deepspeed_hostfile": "cluster.hostfile={}",
    "deepspeed_inclusion_filter": "cluster.include={}",
    "deepspeed_exclusion_filter": "cluster.exclude={}",
    "deepspeed_multinode_launcher": "cluster.transport={}",
    "launcher": "cluster.transport={}",
    "launcher_args": "cluster.pdsh_args=[{}] | with cluster.transport=pdsh; cluster.slurm_args with slurm",
    "force_multi": "cluster.transport=ssh",
    "no_ssh": "cluster.transport=env | for one command on every node, with NNODES, NODE_RANK and MASTER_ADDR",
    "no_ssh_check": "hosts are checked before every start, all at once",
    "ssh_port": "the port of a host stands in its line of the hostfile: worker-1 slots=8 port=2222",
    "node_rank": "one command starts every host of cluster.hostfile; where it runs on each node, NODE_RANK is read "
    "from the environment with cluster.transport=env",
    "machine_rank": "one command starts every host of cluster.hostfile; where it runs on each node, NODE_RANK is read "
    "from the environment with cluster.transport=env",
    "local_rank": "ranks get their number from the launcher",
    "master_addr": "cluster.master_addr={}",
    "main_process_ip": "cluster.master_addr={}",
    "rdzv_endpoint": "cluster.master_addr=VALUE | the port is cluster.master_port",
    "rdzv_backend": "ranks always meet at cluster.master_addr and cluster.master_port, which are found if not given",
    "rdzv_id": "every run has an id of its own",
    "standalone": "cluster.transport=local",
    "master_port": "cluster.master_port={}",
    "main_process_port": "cluster.master_port={}",
    "max_restarts": "restart.max={}",
    "bind_cores_to_rank": "cluster.bind_cores=auto",
    "numa_binding": "cluster.bind_cores=auto",
    "venv_script": "cluster.activate={}",
    "partition": "cluster.transport=slurm cluster.slurm_args=[--partition={}]",
    # what is written
    "output_dir": "run.dir={}",
    "logging_dir": "run.dir={} | logs lie in the run folder",
    "run_name": "run.name={}",
    "overwrite_output_dir": "an existing run folder is never overwritten; continue it with resume=FOLDER",
    "logging_steps": "logging.every_steps={}",
    "report_to": "logging.trackers=[{}] | metrics are always written to metrics.jsonl and for TensorBoard",
    "save_steps": "checkpoint.every_steps={}",
    "save_strategy": "checkpoint.every_epoch=true | checkpoint.every_steps and checkpoint.every_epoch say when",
    "save_total_limit": "checkpoint.keep_last={}",
    "load_best_model_at_end": "checkpoint.keep_best={}",
    "eval_steps": "eval.every_steps={}",
    "eval_strategy": "eval.every_steps=500 | eval.every_steps says when",
    "evaluation_strategy": "eval.every_steps=500 | eval.every_steps says when",
    "eval_on_start": "eval.at_start={}",
    "metric_for_best_model": "eval.metric={}",
    "resume_from_checkpoint": "resume={}",
    "do_train": "training is what run does",
    "do_eval": "held-out rows of dataset.eval are always scored",
}

_FROZEN = {"true": "frozen", "false": "full", "1": "frozen", "0": "full"}
_FLASH = "flash_attention_2"

# Values that change their name with the key; also option names that people type for ours.
VALUES: dict[str, dict[str, str]] = {
    "zero": {
        **{str(n): f"stage{n}" for n in range(4)},
        **{f"zero{n}": f"stage{n}" for n in range(4)},
        **{f"z{n}": f"stage{n}" for n in range(4)},
        **{f"stage_{n}": f"stage{n}" for n in range(4)},
    },
    "precision": {
        "bfloat16": "bf16",
        "torch_bfloat16": "bf16",
        "float32": "fp32",
        "torch_float32": "fp32",
        "float16": "fp16",
        "half": "fp16",
    },
    "attention": {"flash_attn": _FLASH, "flash_attention": _FLASH, "eager": "sdpa", "flash": _FLASH},
    "task": {"generative_reranker": "rerank", "reranker": "rerank"},
    "loss": {
        "generative_reranker": "pointwise",
        "listwise_generative_reranker": "listwise",
        "reranker": "pointwise",
        "listwise_reranker": "listwise",
        "pointwise_reranker": "pointwise",
    },
    "optim": dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "fused_adam"), "adamw"),
    "tune.vision": _FROZEN,
    "tune.projector": _FROZEN,
    "tune.language": _FROZEN,
    "memory.gradient_checkpointing": {"true": "all", "false": "none"},
    "cluster.transport": {
        **dict.fromkeys(("openmpi", "mpich", "impi", "mvapich", "mpi", "standard"), "ssh"),
        **dict.fromkeys(("torchrun", "pytorchjob", "kubernetes"), "env"),
        "sbatch": "slurm",
        "srun": "slurm",
        "none": "local",
    },
    "logging.trackers": {"[none]": "[]", "[tensorboard]": "[]", "[all]": "[wandb,mlflow,swanlab]"},
    "optim.schedule": {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"},
    "eval.metric": {"ndcg": "ndcg@10", "mrr": "mrr@10", "eval_ndcg": "ndcg@10", "eval_mrr": "mrr@10"},
}

# Verbs of other tools and words that people try.
VERBS = {
    "swift": "run",
    "deepspeed": "run",
    "torchrun": "run",
    "train": "run",
    "sft": "run",
    "launch": "run",
    "start": "run",
    "dryrun": "plan",
    "show": "plan",
    "validate": "plan",
    "ps": "status",
    "list": "status",
    "watch": "status",
    "tail": "logs",
    "log": "logs",
    "kill": "stop",
    "cancel": "stop",
    "continue": "resume",
    "sweep": "-m",
    "multirun": "-m",
    "groups": "config",
    "options": "config",
}


def meant(name: str) -> tuple[str, str] | None:
    """Our (template, remark) for a habitual `name`, None when there is none. The template may be empty."""
    entry = HABITS.get(name.lower().replace("-", "_"))
    if entry is None:
        return None
    ours, _, remark = entry.partition(" | ")
    return (ours, remark) if "=" in ours.split()[0] else ("", entry)
