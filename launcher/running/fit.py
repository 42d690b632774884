"""Hands what the probes saw of GPUs and main memory to the planner, and its answer back as findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.measured import read_speeds
from launcher.planning.facts import TextFile
from launcher.planning.refit import Refitted, SeenGpu, refit
from launcher.running.facts import zero_files
from launcher.running.findings import Finding, several
from launcher.running.oddities import user_text
from launcher.spec import RunPlan

Looks = Mapping[str, Any]


def fitted(plan: RunPlan, looks: Looks) -> tuple[Refitted, list[Finding]]:
    """The plan for the memory that is free on the hosts, and what keeps it from fitting."""
    own = plan.config.zero.config
    file = None if own is None else TextFile(path=own, text=Path(own).read_text(encoding="utf-8"))
    ram = {host: look["memory"]["total"] for host, look in looks.items() if "total" in look.get("memory", {})}
    found = refit(plan, list(_gpus(plan, looks)), ram, zero_files(), file, read_speeds())
    findings = [
        Finding(host=host, what="memory", reason=problem.text, tries=problem.tries, config=config)
        for host, problem, config in found.problems
    ]
    return found, findings


def _gpus(plan: RunPlan, looks: Looks) -> Iterator[SeenGpu]:
    """Those that ranks will use, as far as the driver tells their memory."""
    for host in plan.hosts:
        gpus = looks[host.name].get("gpus")
        for gpu in gpus if isinstance(gpus, list) else ():
            if gpu["index"] in host.gpus and gpu["total"] is not None:
                yield SeenGpu(
                    host=host.name,
                    index=gpu["index"],
                    name=gpu["name"],
                    total_bytes=gpu["total"],
                    used_bytes=gpu["used"] or 0,
                    users=several([user_text(user) for user in gpu["users"]]),
                    capability=(able[0], able[1]) if (able := gpu.get("capability")) else None,
                )
