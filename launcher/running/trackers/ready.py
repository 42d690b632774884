"""Whether a tracker can start, looked at before the run does, without importing it or asking its server."""

from __future__ import annotations

import importlib.util
import netrc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from launcher.errors import Problem

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny", "swanlab": "swanlab"}
OFF = ("offline", "local", "dryrun", "disabled")  # modes in which no key is needed
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # stores for which mlflow-skinny needs more packages


def problems(names: Sequence[str], env: Mapping[str, str], home: Path) -> Iterator[Problem]:
    """What keeps the named trackers from starting under this environment."""
    for name in names:
        without = f"logging.trackers=[{','.join(other for other in names if other != name)}]"
        if not _is_installed(name):
            text = f"logging.trackers names {name}, which is not installed"
            yield Problem(text, tries=(f"pip install {PACKAGES[name]}", without))
        else:
            yield from CHECKS[name](env, home, without)


def _is_installed(module: str) -> bool:
    # Not the spec alone: a folder of that name, as wandb makes one where it is used, has one too.
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _wandb(env: Mapping[str, str], home: Path, without: str) -> Iterator[Problem]:
    if env.get("WANDB_MODE") in OFF or env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    host = urlsplit(env.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [Path(env["NETRC"])] if env.get("NETRC") else [home / ".netrc", home / "_netrc"]
    if not any(_knows(file, host) for file in files):
        text = f"wandb has no key: neither WANDB_API_KEY is set nor does {files[0]} know {host}"
        yield Problem(text, tries=("export WANDB_API_KEY=KEY", "export WANDB_MODE=offline", without))


def _mlflow(env: Mapping[str, str], home: Path, without: str) -> Iterator[Problem]:
    where = env.get("MLFLOW_TRACKING_URI")
    if not where:
        tries = ("export MLFLOW_TRACKING_URI=http://HOST:5000", f"export MLFLOW_TRACKING_URI=file://{home}/mlruns")
        yield Problem("mlflow has no place to write to: MLFLOW_TRACKING_URI is not set", tries=(*tries, without))
    elif urlsplit(where).scheme.split("+")[0] in DATABASES and not all(map(_is_installed, ("sqlalchemy", "alembic"))):
        text = "MLFLOW_TRACKING_URI names a database, for which mlflow lacks packages"
        yield Problem(text, tries=("pip install sqlalchemy alembic", without))


def _swanlab(env: Mapping[str, str], home: Path, without: str) -> Iterator[Problem]:
    root = Path(env.get("SWANLAB_ROOT") or env.get("SWANLAB_SAVE_DIR") or home / ".swanlab")
    logins = [root / ".netrc", Path(".swanlab", ".netrc")]
    if env.get("SWANLAB_MODE") in OFF or env.get("SWANLAB_API_KEY") or any(file.is_file() for file in logins):
        return
    text = f"swanlab has no key: neither SWANLAB_API_KEY is set nor is there a {logins[0]}"
    yield Problem(text, tries=("export SWANLAB_API_KEY=KEY", "export SWANLAB_MODE=offline", without))


def _knows(file: Path, host: str) -> bool:
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


CHECKS = {"wandb": _wandb, "mlflow": _mlflow, "swanlab": _swanlab}
