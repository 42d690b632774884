"""Where the configuration files that ship with the package lie: in a checkout, or inside a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    # A wheel carries the top-level folders inside the package, since site-packages/conf would be anybody's.
    shipped = _PACKAGE / f"_{name}"
    return shipped if shipped.is_dir() else _PACKAGE.parent / name


def conf_dir() -> Path:
    """Folder of Hydra groups."""
    return _folder("conf")


def ds_configs_dir() -> Path:
    """Folder of DeepSpeed configurations, one for each option of group `zero`."""
    return _folder("ds_configs")


def hostfiles_dir() -> Path:
    """Folder of example hostfiles."""
    return _folder("hostfiles")
