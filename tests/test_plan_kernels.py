"""Fused decoder layers asked for where they cannot be: the plan says so, before anything starts."""

from __future__ import annotations

import pytest

from launcher.errors import ConfigError
from tests.planning_support import gpus, plan


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("tune.use_dora=true", "use_dora=true makes"),
        ("model=qwen3_vl_30b_a3b", "layers of qwen3_vl_moe have other parts"),
    ],
)
def test_fused_layers_are_refused_where_they_cannot_be(word: str, why: str) -> None:
    model = () if word.startswith("model=") else ("model=qwen3_vl_8b",)
    words = (*model, word, "tune=lora", "dataset.train=/t.jsonl", "gpus=1")
    plan(*words, gpus=gpus(1))
    with pytest.raises(ConfigError, match=why):
        plan(*words, "train.kernels=fused", gpus=gpus(1))
