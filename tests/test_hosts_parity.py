"""Two hosts train as one does, whatever leads to them: real ssh, pdsh and Slurm, real DeepSpeed with gloo."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launcher.rundir import RunDir, complete_checkpoints, read_json
from tests.cluster import Cluster, Host
from tests.digit_rows import data_words, write_digits
from tests.slurm import Slurm

STEPS = 3
JOB = (
    *("zero=stage3", f"train.max_steps={STEPS}", "batch.global_size=6"),
    *("eval.at_start=false", "logging.trackers=[]", "env.set.DS_ACCELERATOR=cpu"),
)


def train(
    folder: Path, *overrides: str, on: Host, before: Sequence[str] = (), env: dict[str, str] | None = None
) -> None:
    """Run the launcher on a host to its end."""
    words = [*JOB, *data_words(on.folder / "rows"), f"run.dir={folder}", *overrides]
    argv = [*before, sys.executable, "-m", "launcher", *words]
    done = on.run(argv, cwd=on.folder, env=env, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, RunDir(folder).metrics.read_text().splitlines())
    found = {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
    assert sorted(found) == list(range(1, STEPS + 1)) and len(set(found.values())) == STEPS
    return [found[step] for step in sorted(found)]


def check_whole(folder: Path, ranks: Sequence[str]) -> None:
    """All that a run leaves is here: each rank's log, a whole checkpoint, an export that can be read, the outcome."""
    from safetensors import safe_open

    run = RunDir(folder)
    assert read_json(run.outcome)["status"] == "done"
    for rank in ranks:
        assert "trainable parameters" in (run.logs / f"{rank}.log").read_text()
    [checkpoint] = complete_checkpoints(run)
    assert checkpoint.name == f"step-{STEPS:06}" and list(checkpoint.glob("*.safetensors"))
    assert read_json(run.export / "config.json")["model_type"] == "qwen3_vl"
    with safe_open(run.export / "model.safetensors", "pt") as weights:
        assert any("embed_tokens" in name for name in weights.keys())  # noqa: SIM118


@pytest.fixture(autouse=True)
def _as_new(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.clear()


@pytest.fixture(scope="module")
def one_host(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of two ranks on one host, without a hostfile."""
    write_digits(cluster.folder / "rows", 24)
    folder = tmp_path_factory.mktemp("one") / "run"
    train(folder, "gpus=2", on=cluster.head)
    return losses(folder)


def test_ssh_with_nothing_shared_and_unequal_slots(cluster: Cluster, one_host: list[float]) -> None:
    """From a head that is no host of the run, to two hosts whose run folders nobody else sees."""
    folder = cluster.private / "runs" / "three"
    hostfile = cluster.hostfile("n1 slots=2", "n2 slots=1")
    train(folder, f"cluster.hostfile={hostfile}", on=cluster.head)
    here = cluster.head.path(folder)
    assert losses(here) == pytest.approx(one_host, rel=1e-5)
    check_whole(here, ["n1.0", "n1.1", "n2.2"])
    assert (cluster.hosts[1].path(folder) / "plan.json").is_file()  # it did have a folder of its own
    # P11: nothing is compiled at the first start, so no lock of a half-built extension can be waited for.
    assert not (cluster.folder / "home" / ".cache" / "torch_extensions").exists()


def test_pdsh(cluster: Cluster, one_host: list[float], runs: Path, tmp_path: Path) -> None:
    real, used = shutil.which("pdsh"), tmp_path / "used"
    (tmp_path / "pdsh").write_text(f'#!/bin/sh\necho "$@" >>{used}\nexec {real} "$@"\n')
    (tmp_path / "pdsh").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    overrides = (f"cluster.hostfile={cluster.hostfile()}", "cluster.transport=pdsh")
    train(runs / "two", *overrides, on=cluster.head, env={"PATH": path})
    assert "-w n1,n2" in used.read_text()
    assert losses(runs / "two") == pytest.approx(one_host, rel=1e-5)
    check_whole(runs / "two", ["n1.0", "n2.1"])


def test_slurm_allocation(cluster: Cluster, slurm: Slurm, one_host: list[float], runs: Path) -> None:
    """Inside `salloc`, with no hostfile: the hosts are those of the allocation."""
    train(runs / "two", "gpus=1", on=cluster.head, before=["salloc", "--quiet", "-N2", "--exclusive"], env=slurm.env)
    assert losses(runs / "two") == pytest.approx(one_host, rel=1e-5)
    check_whole(runs / "two", ["n1.0", "n2.1"])
