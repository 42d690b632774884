"""`env`: what a bug report needs, true of the interpreter that runs, and without a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from launcher import __version__
from launcher.__main__ import main
from launcher.planning.secrets import is_secret, masked
from launcher.running.environment import describe_environment


def test_versions_are_those_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["launcher"].startswith(__version__)
    assert sys.executable in found["python"]
    for name in ("torch", "deepspeed", "transformers", "peft", "hydra-core", "tensorboard"):
        assert found[name] == metadata.version(name)


def test_text_is_aligned_and_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({line.index("  ") for line in lines if line.startswith(("launcher", "transformers"))}) == 2
    assert len({len(line) - len(line.split("  ", 1)[1].lstrip()) for line in lines}) == 1
    assert len(lines) < 60


def test_nothing_is_imported_for_it() -> None:
    code = "import sys; from launcher.__main__ import main; main(['env']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"torch", "deepspeed", "transformers", "hydra", "omegaconf"}


def test_another_interpreter_answers_for_its_own_packages(tmp_path: Path) -> None:
    """`cluster.python` may be an environment of its own: here one without any package."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    found = describe_environment(str(bare / "bin" / "python"))
    assert "torch" not in found and found["python"].endswith("bare/bin/python)")
    assert "torch" in describe_environment(sys.executable)
    assert describe_environment(str(tmp_path / "none"))["python"].startswith("unknown")


def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret1")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret2@hub.example")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "secret3")  # of no use in a report: not shown at all
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "secret" not in shown
    assert "***" in shown and "INFO" in shown


def test_values_that_no_file_can_hold_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run writes them to its folder before it starts."""
    monkeypatch.setitem(os.environb, b"NCCL_DEBUG", b"a\nb\x1b[2J\xff")
    assert describe_environment()["NCCL_DEBUG"] == "a\\nb\\x1b[2J\\udcff"
    json.dumps(describe_environment(), ensure_ascii=False).encode()


def test_an_address_with_a_password_is_a_secret() -> None:
    assert is_secret("MLFLOW_TRACKING_URI", "postgresql://me:hunter2@db/mlflow")
    assert not is_secret("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000/a@b:c")
    assert masked({"A": "s3://bucket/x", "B": "http://u:p@h"}) == {"A": "s3://bucket/x", "B": "***"}


def test_a_checkout_names_its_commit(tmp_path: Path) -> None:
    from launcher.running.environment import _commit

    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    assert _commit(tmp_path) == ""
    subprocess.run([*git, "init", "-q"], check=True, env=env)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True, env=env)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, env=env, capture_output=True, text=True).stdout
    assert _commit(tmp_path) == f"commit {head[:12]}"
    (tmp_path / "new").write_text("x")
    assert _commit(tmp_path) == f"commit {head[:12]}, 1 file changed"
