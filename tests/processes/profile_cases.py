"""The real loop under every profile that works on CPU, in one process group of two ranks.

usage: RANK=.. WORLD_SIZE=.. python -m tests.processes.profile_cases OUT_FOLDER
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from pathlib import Path

from launcher.prepared import SPLITS
from launcher.rundir import RunDir
from launcher.training.loop import Trainer
from launcher.training.metriclog import MetricLog
from launcher.training.outofmemory import MemoryWatch
from launcher.training.prepare import prepare
from launcher.training.rankstatus import RankStatus
from launcher.training.runtime import Rank, distributed
from launcher.training.spared import change_imports, spare_imports
from tests.planning_support import plan

COMMON = ["dataset.max_rows=24", "batch.global_size=6", "batch.max_tokens=400", "zero=stage3"]
COMMON += ["train.max_steps=4", "optim.warmup_steps=1"]
COMMON += ["checkpoint.every_steps=null", "checkpoint.export=false", "checkpoint.at_end=false"]
CASES = {
    "none": [],
    "stopped": ["profile=torch", "profile.first_step=3", "profile.steps=2", "profile.ranks=[1]"],
    "deepspeed": ["profile=deepspeed", "profile.first_step=2"],
    "comms": ["profile=comms", "profile.first_step=2", "profile.steps=2"],
}


class StopsAtTwo(RankStatus):
    """A rank that is asked to stop while step 3 begins."""

    stop_requested = property(lambda self: self._status["step"] >= 2, lambda self, value: None)  # type: ignore[assignment]


def run_case(out: Path, name: str, rank: Rank) -> None:
    """Train as the case says, without evaluation; its files are in OUT/NAME."""
    run = RunDir(out / name)
    run.ranks.mkdir(parents=True, exist_ok=True)
    status = (StopsAtTwo if "stopped" in name else RankStatus)(run.rank(rank.rank), rank.rank, "localhost")
    log = MetricLog(run, rank.rank, status)
    case = plan(*COMMON, *CASES[name], f"run.dir={run.path}")
    prepared = {split: prepare(case, split) for split in SPLITS}
    trainer = Trainer.build(case, run, rank, status, log, prepared, MemoryWatch(case, rank.device))
    trainer.eval_rows = []
    trainer.fit()
    trainer.engine.destroy()


def main() -> None:
    """Run every case."""
    spare_imports(plan(*COMMON))
    change_imports(plan(*COMMON))
    from deepspeed.comm import comm

    out = Path(sys.argv[1])
    source = inspect.getsource(comm.timed_op)
    with distributed(plan(*COMMON)) as rank:
        for name in CASES:
            began = time.monotonic()
            run_case(out, name, rank)
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        (out / "source.json").write_text(json.dumps(source))
    os._exit(0)  # as a rank of a run leaves: gloo's threads may abort in the interpreter's own end


if __name__ == "__main__":
    main()
