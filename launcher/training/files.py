"""Names every file that a run's rows need, for those who bring them to other hosts. No torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from launcher.datafiles import is_hub_name, known_files
from launcher.prepared import SPLITS
from launcher.rundir import read_json
from launcher.spec import RunPlan
from launcher.training.prepare import read_rows


def main(plan: RunPlan) -> int:
    """Print a JSON list of absolute paths: the data files, and the images and videos that their rows name."""
    found: set[str] = set()
    plan = _without_hubs(plan)
    for split in SPLITS if plan.config.dataset.sources("train") else ():
        store = read_rows(plan, split)
        if store is not None:
            found |= {str(path.absolute()) for path in known_files(plan.config.dataset, split)}
            found |= {str(Path(path).absolute()) for path in read_json(store.folder / "media.json")}
    print(json.dumps(sorted(found)))
    return 0


def _without_hubs(plan: RunPlan) -> RunPlan:
    """With the data that lie here alone: what a hub has, each host fetches, and it need not be on this machine."""
    data = plan.config.dataset
    train, held_out = ([name for name in data.sources(split) if not is_hub_name(name)] for split in SPLITS)
    if len(train) + len(held_out) == len(data.sources("train")) + len(data.sources("eval")):
        return plan
    data = replace(data, train=train or held_out, eval=held_out or None, weights=None)
    return replace(plan, config=replace(plan.config, dataset=data))
