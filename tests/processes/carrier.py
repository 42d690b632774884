"""Moves files between hosts of a test, as a launcher on the head does: the job comes as JSON on standard input."""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
from pathlib import Path

from launcher.errors import LauncherError
from launcher.running import fetch, gather, sync
from launcher.running.transport import close_all, doors, open_channels
from launcher.spec import Host
from tests.tiny import tiny_plan


def main() -> int:
    job = json.load(sys.stdin)
    plan = dataclasses.replace(
        tiny_plan(Path(job.get("run_dir", "/nowhere")), **job.get("config", {})),
        hosts=tuple(Host(name=name, gpus=(0,)) for name in job["hosts"]),
        transport="ssh",
        resume_from=job.get("resume_from"),
        env=job.get("env", {}),
        host_env=job.get("host_env", {}),
    )
    shared = dict.fromkeys(job["hosts"], False)
    if job["do"] == "gather":
        print("\n".join(gather.gather(plan, doors(plan), shared, sys.stdout)))
        return 0
    channels = open_channels(plan, queue.Queue())
    try:
        for _ in range(job.get("times", 1)):
            if job["do"] == "sync":
                sync.sync(plan, channels, sys.stdout)
            elif job["do"] == "place":
                gather.place(plan, channels, shared, sys.stdout)
            else:
                print(json.dumps(fetch.fetch(plan, channels, sys.stdout).env))
    except LauncherError as error:
        print(error.render())
        return int(error.exit_code)
    finally:
        close_all(list(channels.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
