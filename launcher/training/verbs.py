"""The verbs that use what a run has trained, each in one process on one device."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from launcher.datafiles import sources_of
from launcher.errors import ConfigError, ExitCode, Problem
from launcher.golden import read_golden, sigmoid, verdict
from launcher.hubs import model_source
from launcher.plain import to_data
from launcher.rundir import write_json
from launcher.spec import RunPlan
from launcher.training import evaluate, export, finished, golden, score
from launcher.training.check import count
from launcher.training.prepare import prepare
from launcher.training.progress import progress


def run(plan: RunPlan, options: argparse.Namespace) -> int:
    """Run one of them; the exit code. Raises LauncherError."""
    if not sys.stderr.isatty():
        disable_progress_bar()  # they are rewritten in place, which a file or a pipe shows as noise
    if options.verb == "score":
        return score.main(plan, options.weights, options.rows, options.out)
    if options.verb == "evaluate":
        return _evaluate(plan, options.weights, options.out)
    if options.verb == "golden":
        return _golden(plan, options.weights, options.tolerance)
    finished.check_whole(options.weights)
    out = export.export_from_checkpoint(plan, options.weights, options.out, warn=lambda text: print(f"warning: {text}"))
    print(f"exported: {out}")
    return int(ExitCode.OK)


def _evaluate(plan: RunPlan, weights: Path, out: Path) -> int:
    """Print and write the metrics of dataset.eval."""
    rows = prepare(plan, "eval")
    if not len(rows):
        raise ConfigError(Problem("dataset.eval has no rows", tries=("dataset.eval=FILE",)), title="with the data")
    model = finished.load(plan, weights)
    begun = time.monotonic()
    done = 0
    with progress("micro-batches scored") as say:

        def beat() -> None:
            nonlocal done
            done += 1
            say(done, None)

        outputs = evaluate.score_rows(model.scorer, model.maker, rows, model.rank, beat=beat)
    if outputs is None or not outputs.rows:
        reasons = "\n".join(model.said[:20])
        raise ConfigError(Problem(f"no row of dataset.eval could be scored\n{reasons}".strip()), title="with the data")
    metrics = evaluate.numbers(outputs, plan.config)
    warnings = list(model.said)
    if plan.config.task.name == "rerank":
        fused = evaluate.fused(outputs.records, plan.config)
        warnings += [*evaluate.warnings(fused.records), *([fused.note] if fused.note else [])]
    width = max(map(len, metrics))
    sources = list(sources_of(plan.config.dataset, "eval")) or [plan.config.dataset.name]
    print(f"{count(outputs.rows, 'row')} of {', '.join(sources)}")
    lines = [f"  {name.removeprefix('eval/'):<{width}}  {value:.4f}" for name, value in metrics.items()]
    print("\n".join([*lines, *(f"warning: {text}" for text in warnings)]))
    content: dict[str, Any] = {
        "weights": str(weights),
        "data": sources,
        "rows": outputs.rows,
        "left_out": [to_data(row) for row in rows.bad],
        "metrics": metrics,
        "warnings": warnings,
        "precision": plan.precision,
        "device": plan.device,
        "seconds": time.monotonic() - begun,
    }
    write_json(out, content)
    print(f"written to {out}")
    return int(ExitCode.OK)


def _golden(plan: RunPlan, folder: Path, tolerance: float | None) -> int:
    """Hold an export to its golden scores, computed here and now by transformers."""
    wanted = read_golden(folder)
    device = torch.device("cuda", 0) if plan.device == "cuda" else torch.device("cpu")
    try:
        exported = golden.Exported(folder, device, model_source(plan.config.model))
    except golden.NotLoadable as error:
        raise ConfigError(Problem(str(error), tries=("python -m launcher export RUN   (writes it again)",))) from error
    found = [sigmoid(exported.logit(pair.query, pair.document, pair.instruction)) for pair in wanted.pairs]
    lines, good = verdict(wanted, found, tolerance or wanted.tolerance)
    print("\n".join(lines))
    return int(ExitCode.OK if good else ExitCode.TRAINING)
