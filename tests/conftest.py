"""What every test stands on: a clean environment, the checkout's own package, GPU tests only where a GPU is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import slurm as slurm_support
from tests.cluster import Cluster, make_cluster, why_not

collect_ignore_glob = ["processes/*", "tools/*", "bench/*"]  # programs, not modules with doctests

REPO = Path(__file__).resolve().parent.parent

# Set by schedulers, launchers and users' shells; each would change what a run or a plan does.
FOREIGN = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES")
FOREIGN_PREFIXES = ("DS_ENV_FILE", "MASTER_", "SLURM_", "NCCL_", "TORCHELASTIC_", "HYDRA_", "LAUNCHER_")
KEPT = ("NCCL_NVLS_ENABLE",)  # says what the machine's NVLink can do, not what a run should

CACHE = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure(config: pytest.Config) -> None:
    """Scrub the environment once, so that fixtures of every scope and all child processes see the same."""
    for name in list(os.environ):
        if (name in FOREIGN or name.startswith(FOREIGN_PREFIXES)) and name not in KEPT:
            del os.environ[name]
    os.environ["HF_HUB_OFFLINE"] = "1"
    # What runs prepare is kept between them; the user's own cache is none of ours.
    os.environ["XDG_CACHE_HOME"] = config.stash.setdefault(CACHE, tempfile.TemporaryDirectory(prefix="cache-")).name
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every child compiles the package anew
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin for a core that others use made tests 10 times slower
    if not _count_gpus():
        os.environ["TRITON_INTERPRET"] = "1"  # read at Triton's import: kernels then run on CPU, as numpy
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where pytest runs in the background it is ignored
    # Children find the package from any folder, installed or not, and then what this process finds.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, rather than skip, what needs more GPUs than there are: a skipped test stays a warning."""
    there = _count_gpus() if any(map(_gpus_needed, items)) else 0
    without = [item for item in items if _gpus_needed(item) > there]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


def _gpus_needed(item: pytest.Item) -> int:
    """The largest N of the test's marks `gpu` (one) and `gpu(N)`."""
    return max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")), default=0)


def _count_gpus() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Hosts n1, n2, n3 with ssh servers, and a head; a test that leaves something behind calls `cluster.clear()`."""
    if why_not():
        pytest.skip(why_not())
    with make_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="session")
def slurm(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_support.Slurm]:
    """Slurm over n1 and n2 of the cluster, used from its head."""
    if why_not(slurm_support.PROGRAMS):
        pytest.skip(why_not(slurm_support.PROGRAMS))
    with slurm_support.start_slurm(cluster, tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An empty folder for run folders."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run `python -m launcher ARGS` to its end, by default in a folder that is not the checkout."""

    def start(
        *args: str, cwd: Path = tmp_path, timeout_s: float = 60, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launcher", *args],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return start


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one and two ranks of DeepSpeed wrote what came of tests.processes.zero_cases; all tests share one start."""
    from concurrent.futures import ThreadPoolExecutor

    from tests.zero_support import start, write_base

    out = tmp_path_factory.mktemp("zero")
    write_base(out)
    with ThreadPoolExecutor() as both:  # one rank leaves a core idle
        list(both.map(start, (1, 2), (out, out)))
    return out
