"""The package as users get it: a wheel, installed elsewhere, plans from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SHIPPED = ("conf", "ds_configs", "hostfiles")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=REPO)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the source distribution, so that both are known to be whole."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=sdist)
    (archive,) = folder.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("site")
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel),
        cwd=target,
    )
    return target


def test_the_wheel_ships_every_file_of_the_package(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(file.relative_to(REPO)) for file in (REPO / "launcher").rglob("*") if belongs(file)}
    for name in SHIPPED:
        files = [file.relative_to(REPO / name) for file in (REPO / name).rglob("*") if belongs(file)]
        assert files
        wanted |= {f"launcher/_{name}/{file.as_posix()}" for file in files}
    wanted.discard("launcher/_hostfiles/default")  # a person's own
    assert wanted <= shipped
    extra = {name for name in shipped - wanted if ".dist-info/" not in name}
    assert extra == set()


def belongs(file: Path) -> bool:
    """A file that is part of the product, not a cache."""
    return file.is_file() and "__pycache__" not in file.parts


@pytest.mark.parametrize("arguments", [(), ("model=qwen3_vl_reranker_8b", "zero=stage3", "nodes=2")])
def test_an_installed_wheel_plans_from_another_folder(
    installed: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    command = (sys.executable, "-m", "launcher", "plan", *arguments)
    assert run(*command, cwd=tmp_path, PYTHONPATH=str(installed)).strip()


def test_the_console_script_is_the_same_program(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "launcher"
    env = {"PYTHONPATH": str(installed)}
    assert run(sys.executable, script, "config", cwd=tmp_path, **env) == run(
        sys.executable, "-m", "launcher", "config", cwd=tmp_path, **env
    )
    assert "launcher" in run(sys.executable, script, "--help", cwd=tmp_path, **env)
