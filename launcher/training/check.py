"""Reads every row and opens every image before any rank starts, so that no run dies of bad data hours in. No torch."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL.Image import DecompressionBombWarning

from launcher.errors import ConfigError, ExitCode, Problem
from launcher.rundir import read_json, write_json
from launcher.spec import RunConfig, RunPlan
from launcher.training.formats import Group, Image, read_split
from launcher.training.images import ImageError, check_image
from launcher.training.jsonl import BadRow

SPLITS = ("train", "eval")
SHOWN = 20  # bad rows of a split named on the terminal; the file holds all
DECODED = 2000  # up to so many images are decoded fully; above, only their headers are read


def main(plan: RunPlan, *, lengths: bool = False) -> int:
    """Check both splits, print what there is, and return 0, or 2 with every problem on standard error.

    `lengths` also tokenises every row, which takes transformers and a while.
    """
    # Pillow's warning names no file; pictures beyond twice that size are refused by name.
    warnings.simplefilter("ignore", DecompressionBombWarning)
    try:
        usable = check_data(plan)
        if lengths:
            check_lengths(plan, usable)
    except ConfigError as error:
        print(error.render(), file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.OK)


def check_data(plan: RunPlan) -> dict[str, list[Group]]:
    """The usable groups of each split, after a summary on the terminal; bad rows go to the run folder, if there is one.

    Raises ConfigError for bad rows, unless `dataset.on_bad=skip`, and for a split without any usable row.
    """
    config, problems, listed, usable = plan.config, [], [], {}
    for split in SPLITS:
        groups, bad = read_split(config, split)
        groups, bad = _check_images(groups, bad)
        usable[split] = groups
        listed += [_listed(split, row) for row in bad]
        if groups or bad or split == "train":
            print(_summary(split, groups, bad), flush=True)
            problems += _problems(config, split, groups, bad)
        if split == "train" and 0 < len(groups) < config.batch.global_size:
            print(f"        fewer than batch.global_size={config.batch.global_size}: every step is a partial batch")
    if Path(plan.run_dir).is_dir():
        write_json(_list_file(plan), listed)
    if problems:
        raise ConfigError(*problems, title="with the data")
    return usable


def check_lengths(plan: RunPlan, usable: dict[str, list[Group]]) -> None:
    """Print the tokens of a query with its documents; raises ConfigError for rows that fit no prompt or micro-batch."""
    from launcher.training.encoding import make_encoder
    from launcher.training.lengths import measure, refusal
    from launcher.training.processors import load_processor

    try:
        encoder = make_encoder(plan, load_processor(plan, local_only=True))
    except ConfigError as error:  # weights that are not here yet say nothing about the data
        print(f"tokens not counted: {error.problems[0].text}", flush=True)
        return
    problems = []
    for split, groups in usable.items():
        found = measure(plan, encoder, groups, range(len(groups)), split)
        if found.tokens:
            print(_token_summary(plan, split, list(found.tokens.values())), flush=True)
        if found.cut:
            limit = plan.config.dataset.max_length
            print(f"        {_count(found.cut, 'document')} cut to fit dataset.max_length={limit}")
        if found.tokens and found.unfit:
            named = ", ".join(groups[row].id for row in list(found.unfit)[:SHOWN])
            print(f"        {_count(len(found.unfit), 'row')} too long: {named}", flush=True)
        problem = refusal(plan, found, split)
        problems += [problem] if problem else []
    if problems:
        raise ConfigError(*problems, title="with the data")


def _token_summary(plan: RunPlan, split: str, tokens: list[int]) -> str:
    ordered, batch = sorted(tokens), plan.batch
    mean = sum(tokens) / len(tokens)
    text = f"{split:<8}tokens a row, shared prefix once: mean {mean:,.0f}, median {ordered[len(ordered) // 2]:,}"
    text += f", 95 % {ordered[len(ordered) * 95 // 100]:,}, longest {ordered[-1]:,}"
    if split == "train":
        micro = math.ceil(mean * batch.global_size / (plan.world_size * batch.max_tokens))
        text += f"; about {micro} micro-batch{'es' if micro != 1 else ''} a rank and step"
    return text


def usable_groups(plan: RunPlan, split: str) -> list[Group]:
    """The groups a run trains or is measured on: the same on every rank.

    Rows whose images `check_data` found unreadable are left out too, by the list it wrote. Raises ConfigError
    for bad rows that `dataset.on_bad` does not allow to skip.
    """
    groups, bad = read_split(plan.config, split)
    if _list_file(plan).is_file():
        skipped = {row["where"] for row in read_json(_list_file(plan)) if row["split"] == split}
        groups = [group for group in groups if group.where not in skipped]
    problems = _problems(plan.config, split, groups, bad) if groups or bad or split == "train" else []
    if problems:
        raise ConfigError(*problems, title="with the data")
    return groups


def note_bad_rows(plan: RunPlan, split: str, rows: list[BadRow]) -> None:
    """Add rows to the run's list of bad ones."""
    if rows and _list_file(plan).parent.is_dir():
        known = read_json(_list_file(plan)) if _list_file(plan).is_file() else []
        write_json(_list_file(plan), known + [_listed(split, row) for row in rows])


def _listed(split: str, row: BadRow) -> dict[str, str]:
    return {"split": split, "where": row.where, "id": row.id, "reason": row.reason}


def images_of(groups: Iterable[Group]) -> dict[Image, list[int]]:
    """Each distinct image with the indices of the groups that use it."""
    users: dict[Image, list[int]] = {}
    for index, group in enumerate(groups):
        for content in (group.query, *group.documents):
            for part in content:
                if isinstance(part, Image):
                    users.setdefault(part, []).append(index)
    return users


def _check_images(groups: list[Group], bad: list[BadRow]) -> tuple[list[Group], list[BadRow]]:
    users = images_of(groups)
    decode = len(users) <= DECODED

    def reason(image: Image) -> str | None:
        try:
            check_image(image, decode=decode)
        except ImageError as error:
            return f"unreadable image: {error}"
        return None

    found: dict[int, str] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes outside the interpreter's lock
        for (_, indices), problem in zip(users.items(), pool.map(reason, users), strict=True):
            if problem:
                for index in indices:
                    found.setdefault(index, problem)
    unreadable = [BadRow(groups[i].where, groups[i].id, problem) for i, problem in sorted(found.items())]
    return [group for i, group in enumerate(groups) if i not in found], bad + unreadable


def _summary(split: str, groups: list[Group], bad: list[BadRow]) -> str:
    documents = sum(len(group.documents) for group in groups)
    images = len(images_of(groups))
    repeats = sum(group.repeats for group in groups)
    parts = [_count(len(groups), "row"), _count(documents, "document"), _count(images, "distinct image")]
    if images > DECODED:
        parts.append("only their headers read")
    if repeats:
        parts.append(f"{_count(repeats, 'repeated document')} dropped")
    if bad:
        parts.append(f"{_count(len(bad), 'bad row')} ({_by_kind(bad)})")
    return f"{split:<8}{', '.join(parts)}"


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def _by_kind(bad: list[BadRow]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in Counter(row.kind for row in bad).most_common())


def _problems(config: RunConfig, split: str, groups: list[Group], bad: list[BadRow]) -> list[Problem]:
    key = f"dataset.{split}"
    source = getattr(config.dataset, split) or config.dataset.name
    if bad and (config.dataset.on_bad == "error" or not groups):
        lines = [f"{len(bad):,} of {len(bad) + len(groups):,} rows of {key}={source} can't be used: {_by_kind(bad)}"]
        lines += [f"{row.where}  id {row.id}  {row.reason}" for row in bad[:SHOWN]]
        if len(bad) > SHOWN:
            lines.append(f"and {len(bad) - SHOWN:,} more")
        tries = ("mend these rows", *(("dataset.on_bad=skip",) if groups else ()))
        return [Problem("\n".join(lines), tries=tries)]
    if not groups:
        return [Problem(f"{key}={source} has no rows", tries=(f"{key}=FILE.jsonl with at least one row",))]
    return []


def _list_file(plan: RunPlan) -> Path:
    return Path(plan.run_dir) / "bad_rows.json"
