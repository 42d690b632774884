"""Which variables hold secrets, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping

MASK = "***"
_MARKS = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL")


def is_secret(name: str) -> bool:
    """Whether the value of variable `name` must not be shown or written."""
    return any(mark in name.upper().replace("TOKENIZER", "") for mark in _MARKS)


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the values of secrets replaced.

    Example:
        >>> masked({"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "INFO"})
        {'HF_TOKEN': '***', 'NCCL_DEBUG': 'INFO'}
    """
    return {name: MASK if is_secret(name) else value for name, value in env.items()}
