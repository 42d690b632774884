"""The benchmarks of launching: whom a text blames, and that the stand-in for ssh still speaks our language."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.fault_table import Cell, blamed

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("text", "hosts", "ranks"),
    [
        ("pdsh@head: n2: ssh exited with exit code 247", ["n2"], []),
        ("n1: [INFO] [launch.py:253:sigkill_handler] Killing subprocess 17", [], []),
        ("Root Cause (first observed failure):\n  host      : n2\n  rank      : 1 (local_rank: 0)", ["n2"], [1]),
        ("[rank0]: RuntimeError: Connection closed by peer [10.77.0.2]:25741", ["n2"], [0]),
        ("\x1b[1mrank 1 on n2 died of SIGKILL\x1b[0m\r\n  later   rank 0 on n1 failed: RuntimeError", ["n2"], [1]),
        ("n1: step 3", [], []),
    ],
)
def test_blamed(text: str, hosts: list[str], ranks: list[int]) -> None:
    assert blamed(text) == (hosts, ranks)


def test_a_cell_says_whom_it_names() -> None:
    named = Cell(gone_s=2.0, exit_code=4, hosts=["n2"], ranks=[1])
    assert named.text("n2", 1) == "2.0 s, exit 4, names n2 rank 1"
    assert named.text("n1", 0) == "2.0 s, exit 4, blames n2"
    both = Cell(exit_code=None, hosts=["n1", "n2"], left=["n2: python"])
    assert both.text("n2", 1) == "not in 60 s, exit -, blames all, **1 left**"


@pytest.mark.skipif(shutil.which("cc") is None, reason="the stand-in for ssh is compiled")
def test_three_hosts_behind_the_stand_in_have_their_orders(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.bench.launch_cost", "--real", "", "--sizes", "3", "--tools", "ours"]
    argv += ["--repeats", "1", "--out", str(tmp_path)]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| 3 | " in done.stdout
