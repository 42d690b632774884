"""Plans of the tiny model for tests of the training plane, built without the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from launcher.resources import conf_dir
from launcher.spec import BatchPlan, CostModel, Host, RunConfig, RunPlan, from_data, to_data

INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."


def tiny_arch(**text: Any) -> dict[str, Any]:
    """The shipped tiny architecture, text numbers overridden.

    With the usual initial weights: the demo's larger ones learn faster, and amplify rounding.
    """
    arch = yaml.safe_load((conf_dir() / "model" / "tiny.yaml").read_text())["arch"]
    for part in ("text_config", "vision_config"):
        arch[part]["initializer_range"] = 0.02
    arch["text_config"].update(text)
    return arch


def tiny_plan(run_dir: Path, *, stage: int = 0, ranks: int = 1, max_tokens: int = 8192, **config: Any) -> RunPlan:
    """A float32 CPU plan; `config` overrides keys of RunConfig as nested dictionaries."""
    base: dict[str, Any] = {
        "model": {"name": "tiny", "family": "qwen3_vl", "weights": "random", "min_pixels": 1024, "max_pixels": 4096},
        "dataset": {"name": "jsonl", "max_length": 1024},
        "task": {"name": "rerank", "instruction": INSTRUCTION},
        "loss": {"name": "listwise"},
        "tune": {"name": "full", "language": "full", "vision": "full", "projector": "full"},
        "train": {"max_steps": 3},
        "optim": {"schedule": "constant", "warmup_ratio": 0.0},
        "batch": {"global_size": 4},
        "zero": {"name": f"stage{stage}", "file": f"stage{stage}.json"},
        "cluster": {"name": "local"},
        "checkpoint": {"every_steps": None, "export": False},
    }
    for group, keys in config.items():
        base[group] = {**base.get(group, {}), **keys}
    run_config = from_data(RunConfig, {**{k: v for k, v in to_data(RunConfig()).items() if k not in base}, **base})
    arch = tiny_arch()
    arch["dtype"] = "float32"
    deepspeed = {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": run_config.optim.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 1000},
    }
    return RunPlan(
        run_id="test",
        created_at="2026-01-01T00:00:00+00:00",
        version="0",
        run_dir=str(run_dir),
        resume_from=None,
        config=run_config,
        hosts=(Host(name="localhost", gpus=tuple(range(ranks))),),
        hosts_source="a test",
        hosts_assumed=False,
        transport="local",
        device="cpu",
        gpu_kind=None,
        master_addr="127.0.0.1",
        master_port=None,
        precision="fp32",
        precision_reason="a test",
        attention="reference",
        attention_reason="a test",
        checkpointed_layers=0,
        lr=1e-3,
        warmup_steps=0,
        arch=arch,
        parameters={},
        trainable={},
        batch=BatchPlan(
            global_size=run_config.batch.global_size,
            max_tokens=max_tokens,
            train_rows=None,
            eval_rows=None,
            steps_per_epoch=None,
            total_steps=None,
            micro_steps=None,
        ),
        cost=CostModel(token=1e6, token_pair=1e3, patch=1e5, patch_pair=1e2),
        deepspeed=deepspeed,
        memory={},
        env={},
        host_env={},
        cores={},
        commands={},
    )
