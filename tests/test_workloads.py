"""The rows that are timed have the number of tokens that their figures are compared at."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.resources import conf_dir
from launcher.spec import DatasetConfig, VideoOptions
from launcher.training.encoding import Encoder
from launcher.training.media import MediaRule
from launcher.training.pieces import PieceEncoder
from launcher.training.processors import MAX_PIXELS, MIN_PIXELS, build_processor
from tests.bench.workloads import write_workloads
from tests.groups import read_groups
from tests.tiny import INSTRUCTION

# Tokens of a group when every document repeats the query, and when it is computed once.
WANTED = {"text": (3795, 2668), "page": (4385, 4141), "imgq": (9409, 1912)}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    arch = yaml.safe_load((conf_dir() / "model" / "qwen3_vl_8b.yaml").read_text())["arch"]
    rule = MediaRule(
        patch_size=16, merge_size=2, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS, video=VideoOptions(), timestamps=True
    )
    return Encoder(PieceEncoder(build_processor(arch).tokenizer, rule, max_length=4096), instruction=INSTRUCTION)


def test_tokens_of_a_group(encoder: Encoder, tmp_path: Path) -> None:
    files = write_workloads(tmp_path, rows=6)
    for name, wanted in WANTED.items():
        groups, bad = read_groups(
            DatasetConfig(name="jsonl", train=str(files[name])), "train", seed=0, need_negatives=True
        )
        assert (len(groups), bad) == (6, [])
        encoded = [encoder.encode(group) for group in groups]
        alone = sum(len(prompt) for e in encoded for prompt in e.prompts) / 6
        shared = sum(e.tokens for e in encoded) / 6
        assert (alone, shared) == pytest.approx(wanted, rel=0.03), name
        assert max(len(prompt) for e in encoded for prompt in e.prompts) < encoder.pieces.max_length, name
