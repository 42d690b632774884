"""The planes do not mix: who may import whom, read from the source and seen in real processes."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.training.functions import load_function
from launcher.training.spared import has_own_code, spare_imports
from tests.tiny import tiny_plan

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "launcher"
HEAVY = {"torch", "torchvision", "deepspeed", "transformers", "peft", "datasets"}
SHARED = {f"launcher.{file.stem}" for file in PACKAGE.glob("*.py") if not file.stem.startswith("__")}

# Plane -> modules (by prefix) that its files never import, not even inside a function.
FORBIDDEN = {
    "planning": HEAVY | {"launcher.training", "launcher.reporting", "launcher.running.supervise", "launcher.__main__"},
    "running": HEAVY | {"launcher.training", "launcher.__main__"},
    "reporting": HEAVY
    | {"hydra", "omegaconf", "launcher.training", "launcher.planning.config", "launcher.running.supervise"}
    | {"launcher.__main__"},
    "training": {"hydra", "omegaconf", "launcher.planning", "launcher.running", "launcher.reporting"}
    | {"launcher.__main__"},
}


def module_name(file: Path) -> str:
    """`launcher/planning/zero.py` -> `launcher.planning.zero`."""
    parts = file.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> set[str]:
    """Every module that a file imports, at any depth; `from a import b` counts as `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_name(file).split(".")
            if file.name != "__init__.py":
                package = package[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            found.add(origin)
            found.update(f"{origin}.{alias.name}" for alias in node.names)
    return found


def under(module: str, prefixes: set[str]) -> bool:
    """Whether `module` is one of `prefixes` or inside one."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def source_files(*folders: str) -> list[Path]:
    """The package's Python files, of some folders or of all."""
    roots = [PACKAGE / folder for folder in folders] if folders else [PACKAGE]
    return sorted(file for root in roots for file in root.rglob("*.py"))


@pytest.mark.parametrize("plane", sorted(FORBIDDEN))
def test_a_plane_imports_nothing_that_is_forbidden_to_it(plane: str) -> None:
    """Y19: ranks read the plan that was made, and cannot compose another: training has no Hydra."""
    files = source_files(plane)
    assert len(files) > 3  # the test looks at something
    wrong = {
        str(file.relative_to(REPO)): sorted(bad)
        for file in files
        if (bad := {module for module in imports(file) if under(module, FORBIDDEN[plane])})
    }
    assert wrong == {}


@pytest.mark.parametrize("name", sorted(SHARED))
def test_what_both_planes_share_uses_the_standard_library_only(name: str) -> None:
    file = PACKAGE / f"{name.removeprefix('launcher.')}.py"
    # These two read what only a package can: the card of a hub's data set, the number of rows of a Parquet file.
    readers = {"yaml", "pyarrow"} if name == "launcher.datafiles" else set()
    allowed = set(sys.stdlib_module_names) | SHARED | {"launcher.__version__"} | readers
    assert {module for module in imports(file) if not under(module, allowed)} <= {"launcher"}


def test_nothing_imports_the_entry_points() -> None:
    entries = {"launcher.__main__", "launcher.training.__main__"}
    assert [str(file) for file in source_files() if any(under(module, entries) for module in imports(file))] == []


def loaded_after(statement: str) -> set[str]:
    """Top-level packages and our own modules in a new interpreter after `statement`."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("plane", ["planning", "running", "reporting"])
def test_importing_a_whole_plane_loads_nothing_heavy(plane: str) -> None:
    names = [module_name(file) for file in source_files(plane) if file.name != "__main__.py"]
    modules = loaded_after("\n".join(f"import {name}" for name in names))
    assert set(names) <= modules
    assert {module for module in modules if under(module, HEAVY | {"launcher.training"})} == set()


def test_the_agent_and_the_data_check_load_little() -> None:
    third_party = HEAVY | {"hydra", "omegaconf", "rich", "yaml", "numpy"}
    modules = loaded_after("import launcher.running.agent")
    assert {module for module in modules if under(module, third_party)} == set()
    modules = loaded_after("import launcher.training.check")
    assert {module for module in modules if under(module, {"torch", "deepspeed", "hydra", "omegaconf"})} == set()


@pytest.mark.parametrize(
    ("config", "spared"),
    [
        ({}, {"mlflow", "bitsandbytes", "scipy", "sklearn"}),
        ({"tune": {"name": "qlora"}}, {"mlflow"}),
        ({"optim": {"name": "adamw8bit"}}, {"mlflow"}),
    ],
)
def test_ranks_import_nothing_merely_because_it_is_there(
    config: dict[str, Any], spared: set[str], tmp_path: Path
) -> None:
    modules: dict[str, Any] = {"torch": 1}
    spare_imports(tiny_plan(tmp_path, **config), modules)
    assert {name for name, module in modules.items() if module is None} == spared


def test_what_ranks_do_without_is_there_once_it_is_wanted(tmp_path: Path) -> None:
    """In a real process: torch's compiler above all, its marks and what is kept between starts."""
    env = {**os.environ, "PYTHONPATH": str(REPO), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = [sys.executable, "tests/processes/import_cases.py", str(tmp_path)]
    done = subprocess.run(program, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("too early") == []
    assert all(found.values()), found


def test_a_users_function_finds_transformers_whole(tmp_path: Path) -> None:
    plans = [
        tiny_plan(tmp_path, **config) for config in ({}, {"loss": {"function": "a:b"}}, {"dataset": {"format": "a:b"}})
    ]
    assert [has_own_code(plan) for plan in plans] == [False, True, True]


def test_a_users_function_may_import_what_ranks_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("mlflow", "LOSS = 3\n"), ("my_loss", "import mlflow\n\n\ndef f():\n    return mlflow.LOSS\n")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)  # and is as it was once the test is over
    monkeypatch.syspath_prepend(str(tmp_path))
    spare_imports(tiny_plan(tmp_path))
    with pytest.raises(ImportError):
        importlib.import_module("mlflow")
    assert load_function("my_loss:f", "loss.function")() == 3


def test_nothing_is_read_in_a_form_that_can_run_code() -> None:
    """C12: checkpoints are safetensors and JSON."""
    unsafe = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
    called = re.compile(r"\b(torch|np|numpy|yaml)\.load\(|trust_remote_code=True")
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not called.search(text), file
        if any(name in text for name in unsafe):  # a word in a comment does no harm
            assert not unsafe & imports(file), file


def test_plan_answers_without_torch(tmp_path: Path) -> None:
    """In a real process: any import of a heavy package would fail."""
    for name in HEAVY:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('plan imported {name}')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    command = [sys.executable, "-m", "launcher", "plan", "model=qwen3_vl_reranker_8b", "zero=stage3", "nodes=2"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "qwen3_vl_reranker_8b" in done.stdout
