"""What each rank runs: torch, DeepSpeed, transformers, peft. Reads plan.json and nothing else."""
