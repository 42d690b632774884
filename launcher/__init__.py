"""Plan, start and supervise DeepSpeed fine-tuning of Qwen-VL models from one command."""

__version__ = "0.1.0"
