"""The set-up behind `make`: plain words when something is missing, and a lock that fits pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_purity import imports

REPO = Path(__file__).resolve().parent.parent
SCRIPT = REPO / "tests" / "tools" / "setup.sh"


def set_up(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the set-up script for a new environment inside `tmp_path`."""
    return subprocess.run(
        ["/bin/bash", SCRIPT],
        env={**os.environ, "VENV": str(tmp_path / "venv"), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def program(path: Path, body: str) -> Path:
    """A small executable shell script."""
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_that_does_not_fit_is_named(tmp_path: Path) -> None:
    old = program(tmp_path / "python", 'case "$*" in *print*) echo 3.8 ;; *) exit 1 ;; esac')
    done = set_up(tmp_path, PYTHON=str(old))
    assert done.returncode == 1
    assert f"PYTHON={old} is not a Python 3.10 to 3.13 (3.8)" in done.stderr
    assert "try  make demo PYTHON=" in done.stderr


def test_a_missing_interpreter_is_said(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dirname", "uname", "cat"):
        program(
            tools / name, f'exec /usr/bin/{name} "$@"' if Path(f"/usr/bin/{name}").exists() else f'/bin/{name} "$@"'
        )
    done = set_up(tmp_path, PATH=str(tools), PYTHON="")
    assert done.returncode == 1
    assert "no Python 3.10 to 3.13 found (python3 is missing)" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


def test_an_index_out_of_reach_is_said(tmp_path: Path) -> None:
    """A closed port on this machine stands for a network that is down."""
    env = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    done = set_up(tmp_path, **env, PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")
    assert done.returncode == 1
    assert "the package index is not reachable from here" in done.stderr
    assert (tmp_path / "venv" / "install.log").is_file()
    assert not (tmp_path / "venv" / ".ready").exists()


def locked(python_version: str) -> dict[str, str]:
    """Package -> version that the lock gives an interpreter on Linux."""
    environment = {**default_environment(), "sys_platform": "linux", "python_version": python_version}
    lines = (REPO / "requirements-test.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(environment)
    }


def project_requirements() -> list[Requirement]:
    """What pyproject.toml asks for, the dev extra included."""
    text = (REPO / "pyproject.toml").read_text()  # tomllib is missing in Python 3.10
    lists = re.findall(r"^(?:dependencies|dev) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert len(lists) == 2
    return [Requirement(item) for body in lists for item in re.findall(r'"([^"]+)"', body)]


def test_the_project_asks_for_all_that_its_code_imports() -> None:
    names = {
        "PIL": "pillow",
        "huggingface_hub": "huggingface-hub",
        "hydra": "hydra-core",
        "mlflow": "mlflow-skinny",
        "pynvml": "nvidia-ml-py",
        "yaml": "pyyaml",
    }
    optional = {"cudnn", "flash_attn", "flash_attn_interface", "modelscope", "triton"}  # the last comes with torch
    imported = {module.split(".")[0] for file in (REPO / "launcher").rglob("*.py") for module in imports(file)}
    foreign = imported - set(sys.stdlib_module_names) - optional - {"launcher", "__future__"}
    assert {names.get(name, name) for name in foreign} <= {canonicalize_name(r.name) for r in project_requirements()}


@pytest.mark.parametrize("python_version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_lock_pins_what_the_project_asks_for(python_version: str) -> None:
    pins = locked(python_version)
    requirements = project_requirements()
    assert len(requirements) > 10
    for requirement in requirements:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
