"""Names every file that a run's rows need, for those who bring them to other hosts. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.spec import RunPlan
from launcher.training.check import SPLITS, images_of
from launcher.training.formats import read_split


def main(plan: RunPlan) -> int:
    """Print a JSON list of absolute paths: the data files and the images that usable rows name."""
    config = plan.config
    found = [path for path in (config.dataset.train, config.dataset.eval) if path]
    for split in SPLITS:
        groups, _ = read_split(config, split)
        found += [image.path for image in images_of(groups) if image.path is not None]
    print(json.dumps(sorted({str(Path(path).absolute()) for path in found})))
    return 0
