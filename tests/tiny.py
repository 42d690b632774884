"""Plans of the tiny model for tests of the training plane, built without the planner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from launcher.plain import from_data, to_data
from launcher.resources import conf_dir
from launcher.spec import BatchPlan, CostModel, Host, RunConfig, RunPlan

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


# The shipped file that a family's tiny architecture shrinks, and the sizes that differ from COMMON.
SHIPPED = {
    "qwen3_vl": "qwen3_vl_2b",
    "qwen3_vl_moe": "qwen3_vl_30b_a3b",
    "qwen2_5_vl": "qwen2_5_vl_7b",
    "qwen3_5": "qwen3_5_9b",
    "qwen3_5_moe": "qwen3_5_35b_a3b",
    "qwen3": "qwen3_8b",
    "qwen2": "qwen2_5_72b",
}
COMMON = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
COMMON |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "linear_num_key_heads": 2}
COMMON |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_position_embeddings": 64}
TOWER |= {"out_hidden_size": 64, "window_size": 56}
LISTS = {"deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1]}


def family_arch(family: str) -> dict[str, Any]:
    """A tiny architecture of any family: the numbers of a shipped one made small, its structure kept."""
    arch = yaml.safe_load((conf_dir() / "model" / f"{SHIPPED[family]}.yaml").read_text())["arch"]
    text, vision = arch.get("text_config", arch), arch.get("vision_config", {})
    text |= {key: value for key, value in COMMON.items() if key in text}
    vision |= {key: value for key, value in (TOWER | LISTS).items() if key in vision}
    if "full_attention_interval" in text:
        text["full_attention_interval"] = 2
    for key in ("bos_token_id", "eos_token_id"):  # they come from the tokenizer that is built
        del text[key]
    rope = text["rope_parameters"]
    if "mrope_section" in rope:  # it sums to half of the rotated part of a head
        half = int(text.get("head_dim", 16) * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return {**arch, "dtype": "float32"}


def family_plan(run_dir: Path, family: str, **config: Any) -> RunPlan:
    """A plan of a tiny model of a family; other arguments as in `tiny_plan`."""
    return in_family(tiny_plan(run_dir, **config), family)


def in_family(plan: RunPlan, family: str) -> RunPlan:
    """The same plan with a tiny model of another family."""
    arch = family_arch(family)
    low, high = (1024, 16384) if "vision_config" in arch else (None, None)
    model = replace(plan.config.model, name=family, family="auto", min_pixels=low, max_pixels=high)
    return replace(plan, config=replace(plan.config, model=model), arch=arch)


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
