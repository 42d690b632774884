"""DeepSpeed's node launcher without its imports gives ranks what it gives them with all of these."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
WORLD = {"a": [0], "b": [2, 5]}
RANK = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "MASTER_ADDR", "MASTER_PORT")
with open(sys.argv[1] + os.environ["RANK"], "w") as out:
    json.dump({**{name: os.environ[name] for name in names}, "sees": os.environ["CUDA_VISIBLE_DEVICES"]}, out)
"""


def test_ranks_start_as_by_deepspeed_and_nothing_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    world = base64.urlsafe_b64encode(json.dumps(WORLD).encode()).decode()
    words = [f"--world_info={world}", "--node_rank=1", "--master_addr=a", "--master_port=29512", "--no_local_rank"]
    # -X importtime names every module that the launcher imports.
    argv = [sys.executable, "-X", "importtime", "-m", "launcher.running.nodelaunch", *words]
    done = subprocess.run(
        [*argv, str(tmp_path / "rank.py"), str(tmp_path / "rank.")],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=True,
    )
    seen = [json.loads((tmp_path / f"rank.{rank}").read_text()) for rank in (1, 2)]
    common = {"WORLD_SIZE": "3", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29512"}
    ranks = ({"RANK": "1", "LOCAL_RANK": "1"}, {"RANK": "2", "LOCAL_RANK": "0"})
    assert seen == [{**common, **own, "sees": "2,5"} for own in ranks]
    assert "[INFO] [launch.py:" in done.stdout and "dist_world_size=3" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "psutil" in imported and not imported & {"torch", "numpy", "deepspeed"}
