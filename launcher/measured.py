"""Where the speed of a machine is kept once `python -m launcher check speed` has measured it.

    CACHE/launcher/speed/HOST.json     of this user; a home that hosts share holds one a host

Standard library only: the training plane writes it, plans are made with it.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

from launcher.rundir import read_json

VERSION = 1  # of what is written
RATES = ("matmul_tflops", "memory_gbs", "attention_tflops", "launch_s", "host_gbs", "link_gbs")


def speed_dir() -> Path:
    """Folder of all that was measured, in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "launcher" / "speed"


def speed_file(host: str | None = None) -> Path:
    """The file of a host, by default of this one."""
    return speed_dir() / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', host or socket.gethostname())}.json"


def read_speeds() -> list[dict[str, Any]]:
    """What was measured on any host that shares this folder, this one first, then the newest."""
    own, found = speed_file(), []
    for path in speed_dir().glob("*.json") if speed_dir().is_dir() else ():
        try:
            content = read_json(path)
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("version") == VERSION:
            found.append((path != own, content))
    found.sort(key=lambda one: str(one[1].get("date")), reverse=True)
    return [content for _, content in sorted(found, key=lambda one: one[0])]
