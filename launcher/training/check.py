"""Reads every row and opens every image before any rank starts, so that no run dies of bad data hours in. No torch."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.arithmetic import steps_per_epoch
from launcher.errors import ConfigError, ExitCode, LauncherError, Problem
from launcher.families import SEEING_PARTS
from launcher.prepared import SPLITS, columns, histogram_lines, lengths_folder, modality_lines, summary_of
from launcher.rundir import read_json, write_json
from launcher.spec import RunConfig, RunPlan
from launcher.streams import printable
from launcher.training.functions import load_function
from launcher.training.jsonl import BadRow
from launcher.training.prepare import Prepared, prepare, problems_of, read_rows
from launcher.training.rowstore import RowStore

SHOWN = 20  # too long rows named on the terminal; the file of bad rows holds all


def main(plan: RunPlan, *, lengths: bool = False, show: int = 0) -> int:
    """Check both splits, print what there is, and return 0, or 2 with every problem on standard error.

    `lengths` also decodes every image and tokenises every row, which takes transformers and a while; `show` prints
    so many rows of the training split as the model sees them.
    """
    try:
        if plan.config.loss.function is not None:
            load_function(plan.config.loss.function, "loss.function")
        stores = check_data(plan, decode=lengths)
        if lengths and _has_tokenizer(plan, stores):
            check_lengths(plan, stores)
            if show:
                from launcher.training.show import show_rows

                show_rows(plan, prepare(plan, "train"), show)
    except LauncherError as error:
        print(error.render(), file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.OK)


def check_data(plan: RunPlan, *, decode: bool = False) -> dict[str, RowStore]:
    """The rows of each split, after a summary on the terminal; bad rows go to the run folder, if there is one.

    Raises ConfigError for bad rows, unless they may be left out, and for a split without any usable row.
    """
    problems, listed, stores = [], [], {}
    for split in SPLITS:
        store = read_rows(plan, split, decode=decode)
        if store is None:
            continue
        stores[split] = store
        listed += [_listed(split, row) for row in store.bad]
        print(_summary(split, store), flush=True)
        if store.bad:
            print(printable("\n".join(_by_reason(store.bad))), flush=True)
        problems += problems_of(plan.config, split, store)
        if split == "train" and len(store):
            _say_steps(plan.config, len(store))
            problems += _unreached(plan, store)
    if Path(plan.run_dir).is_dir():
        write_json(_list_file(plan), listed)
    if problems:
        raise ConfigError(*problems, title="with the data")
    return stores


def _has_tokenizer(plan: RunPlan, stores: dict[str, RowStore]) -> bool:
    """Whether tokens can be counted; weights that are not here yet say nothing about the data."""
    if all(summary_of(lengths_folder(plan.config, store.folder)) for store in stores.values()):
        return True
    from launcher.training.processors import load_processor

    try:
        load_processor(plan, local_only=True)
    except ConfigError as error:
        print(f"tokens not counted: {error.problems[0].text}", flush=True)
        return False
    return True


def check_lengths(plan: RunPlan, splits: Iterable[str]) -> None:
    """Print tokens and kinds of content; raises ConfigError for rows that fit no prompt or micro-batch."""
    problems: list[Problem] = []
    for split in splits:
        found = prepare(plan, split, problems=problems)
        summary = found.summary()
        assert summary is not None
        if len(found):
            print(_token_summary(plan, split, found), flush=True)
        lengths, limit = summary["lengths"], plan.config.dataset.max_length
        if lengths["cut"]:
            print(f"        {count(lengths['cut'], 'document')} cut to fit dataset.max_length={limit}")
        if lengths["shrunk"]:
            print(f"        images of {count(lengths['shrunk'], 'prompt')} scaled down to fit it")
        if len(found) and found.left_out:
            named = ", ".join(row.id for row in found.left_out[:SHOWN])
            print(f"        {count(len(found.left_out), 'row')} too long: {printable(named)}", flush=True)
        print(
            "\n".join(f"        {line}" for line in (*modality_lines(summary), *histogram_lines(summary))), flush=True
        )
    if problems:
        raise ConfigError(*problems, title="with the data")


def _say_steps(config: RunConfig, rows: int) -> None:
    size = config.batch.global_size
    if rows < size:
        steps = count(steps_per_epoch(rows, size), "step")
        print(f"        fewer than batch.global_size={size}: {steps} an epoch, a partial batch", flush=True)


def _unreached(plan: RunPlan, store: RowStore) -> list[Problem]:
    """Parts that train and that only images reach, where there are none: a problem when nothing else trains."""
    if store.has_media:
        return []
    parts = [part for part, count in plan.trainable.items() if count]
    idle = [part for part in SEEING_PARTS if part in parts]
    if not idle:
        return []
    names = " and ".join(idle)
    if len(idle) < len(parts):
        print(f"        no image or video: nothing reaches {names}, to be trained", flush=True)
        return []
    text = f"no row of dataset.train shows an image or a video, and nothing but {names} trains"
    tries = (f"tune.language={plan.config.tune.name}", "dataset.train=FILE.jsonl with images")
    return [Problem(text, tries=tries)]


def _token_summary(plan: RunPlan, split: str, rows: Prepared) -> str:
    ordered, batch = sorted(rows.tokens.tolist()), plan.batch
    mean = sum(ordered) / len(ordered)
    text = f"{split:<8}tokens a row, shared prefix once: mean {mean:,.0f}, median {ordered[len(ordered) // 2]:,}"
    text += f", 95 % {ordered[len(ordered) * 95 // 100]:,}, longest {ordered[-1]:,}"
    if split == "train":
        micro = math.ceil(mean * batch.global_size / (plan.world_size * batch.max_tokens))
        text += f"; about {micro} micro-batch{'es' if micro != 1 else ''} a rank and step"
    return text


def note_bad_rows(plan: RunPlan, split: str, rows: Sequence[BadRow]) -> None:
    """Add rows to the run's list of bad ones."""
    if rows and _list_file(plan).parent.is_dir():
        known = read_json(_list_file(plan)) if _list_file(plan).is_file() else []
        write_json(_list_file(plan), known + [_listed(split, row) for row in rows])


def _listed(split: str, row: BadRow) -> dict[str, str]:
    return {"split": split, "where": row.where, "id": row.id, "reason": row.reason}


def _summary(split: str, store: RowStore) -> str:
    found = store.summary
    parts = [count(found["rows"], "row")]
    if "messages" not in found["modality"]:
        parts.append(count(found["documents"], "document"))
    parts.append(count(found["images"], "distinct image"))
    if found["videos"]:
        parts.append(count(found["videos"], "distinct video"))
    if not found["decoded"]:
        parts.append("only their headers read")
    if found["repeats"]:
        parts.append(f"{count(found['repeats'], 'repeated document')} dropped")
    if found["contradictory"]:
        parts.append(f"{count(found['contradictory'], 'document')} on both sides dropped")
    if store.bad:
        parts.append(f"{count(len(store.bad), 'bad row')}")
    return f"{split:<8}{', '.join(parts)}"


def _by_reason(bad: Sequence[BadRow]) -> list[str]:
    """A table of reasons, each with its first row."""
    first = {row.kind: row.where for row in reversed(bad)}
    counts = Counter(row.kind for row in bad).most_common()
    rows = [("bad rows", "", "first in"), *((f"{count:,}", kind, first[kind]) for kind, count in counts)]
    return [f"        {line}" for line in columns(rows, right=(0,))]


def count(number: int, unit: str) -> str:
    """A number with its noun."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def _list_file(plan: RunPlan) -> Path:
    return Path(plan.run_dir) / "bad_rows.json"
