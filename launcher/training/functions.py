"""A user's own function, named as package.module:function. No torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.training.spared import bring_back


def load_function(name: str, key: str) -> Callable[..., Any]:
    """The function that `key` names; raises ConfigError when it cannot be imported or called."""
    module_name, _, function_name = name.partition(":")
    bring_back()
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        reason = f"{type(error).__name__}: {error}"
        tries = ("install the package", "PYTHONPATH=FOLDER   (env.set.PYTHONPATH=FOLDER for the ranks)")
        raise ConfigError(Problem(f"{key}={name} cannot be imported: {reason}", tries=tries)) from error
    if not callable(function):
        raise ConfigError(Problem(f"{key}={name} is {type(function).__name__}, not a function"))
    return function  # type: ignore[no-any-return]
