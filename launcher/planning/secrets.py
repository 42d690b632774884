"""Which variables hold secrets, and how they are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"
_USER_IN_ADDRESS = re.compile(r"://[^/\s@]*:[^/\s@]+@")
_MARKS = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL")


def is_secret(name: str, value: object = "") -> bool:
    """Whether a variable must not be shown or written: by its name, or because its address holds a password.

    Example:
        >>> is_secret("MLFLOW_TRACKING_URI", "https://me:hunter2@host"), is_secret("HF_ENDPOINT", "https://host")
        (True, False)
    """
    named = any(mark in name.upper().replace("TOKENIZER", "") for mark in _MARKS)
    return named or _USER_IN_ADDRESS.search(str(value)) is not None


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the values of secrets replaced.

    Example:
        >>> masked({"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "INFO"})
        {'HF_TOKEN': '***', 'NCCL_DEBUG': 'INFO'}
    """
    return {name: MASK if is_secret(name, value) else value for name, value in env.items()}
