"""Reads the rows of a plan, after a while of holding their lock; says which file it got them from."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from launcher.prepared import rows_folder
from launcher.spec import plan_from_json
from launcher.training.prepare import locked, read_rows

if __name__ == "__main__":
    plan = plan_from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "hold" in sys.argv:
        with locked(rows_folder(plan.config, "train")):
            print("holding", flush=True)
            time.sleep(600)
    store = read_rows(plan, "train")
    assert store is not None
    print(len(store), (store.folder / "rows.arrow").stat().st_ino, flush=True)
