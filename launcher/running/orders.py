"""What the agent of a host is asked to do."""

from __future__ import annotations

import os
import sys

from launcher.planning.command import node_launcher_argv
from launcher.running.agent import Order
from launcher.spec import RunPlan


def order_of(plan: RunPlan, node_rank: int, *, files: dict[str, str], lost_contact_s: float | None) -> Order:
    """The order for one host; `files` are for a run folder that is not shared, both are empty on this machine."""
    cluster, host = plan.config.cluster, plan.hosts[node_rank]
    python = cluster.python or ("python" if cluster.activate else sys.executable)
    first = sum(before.slots for before in plan.hosts[:node_rank])
    return Order(
        run_id=plan.run_id,
        host=host.name,
        run_dir=plan.run_dir,
        cwd=os.getcwd(),
        argv=list(node_launcher_argv(plan, node_rank, python)),
        env={**plan.env, **plan.host_env.get(host.name, {})},
        ranks=list(range(first, first + host.slots)),
        stop_grace_s=cluster.stop_grace_s,
        monitor_every_s=plan.config.logging.monitor_every_s,
        gpus=list(host.gpus) if plan.device == "cuda" else [],
        lost_contact_s=lost_contact_s,
        files=files,
        adopt=plan.transport == "pdsh",
    )
