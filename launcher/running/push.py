"""Uploads an export to the Hugging Face Hub. The token comes from HF_TOKEN or `hf auth login`, never from a word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, MachineError, Problem

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_push(repo: str, *, public: bool) -> None:
    """Raise ConfigError, before anything is written, when a push could not work or would show what is private."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    problems = []
    if not _NAME.fullmatch(repo):
        problems.append(Problem(f"--push {repo}: a repository is NAME/REPO", tries=("--push NAME/REPO",)))
    if constants.HF_HUB_OFFLINE:
        problems.append(Problem("HF_HUB_OFFLINE is set: nothing can be pushed", tries=("unset HF_HUB_OFFLINE",)))
    if get_token() is None:
        tries = ("hf auth login", "HF_TOKEN in the environment")
        problems.append(Problem("there is no token for the Hugging Face Hub", tries=tries))
    if problems:
        raise ConfigError(*problems, title="with this push")
    try:
        info: Any = HfApi().repo_info(repo)
    except RepositoryNotFoundError:
        return
    except Exception as error:
        raise _unreachable(repo, error) from error
    if not info.private and not public:
        raise ConfigError(Problem(f"{repo} is public", tries=("--public", "--push NAME/OTHER")), title="with this push")


def push(folder: Path, repo: str, *, public: bool) -> str:
    """Upload a folder, into a new private repository unless it exists; its address. Raises MachineError."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repo, private=not public, exist_ok=True)
        return str(HfApi().upload_folder(folder_path=folder, repo_id=repo, commit_message="Export"))
    except Exception as error:
        raise _unreachable(repo, error) from error


def _unreachable(repo: str, error: Exception) -> MachineError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return MachineError(Problem(f"{repo} cannot be pushed to: {first}", tries=("the same command later",)))
