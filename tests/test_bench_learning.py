"""The task that the benchmark of learning writes in every form of row: read again, each form says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.spec import DatasetConfig, LossConfig, RunConfig, TaskConfig
from launcher.training.detect import PARSERS, detect
from launcher.training.formats import BadRow, raw_rows, read_split
from launcher.training.jsonl import parse_line
from launcher.training.rows import Group
from tests.bench import learning


def test_every_form_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what a model learns from one form of a text query with its documents it learns from each."""
    monkeypatch.setattr(learning, "PICTURES_OF", 20)
    told, said = set(), dict[str, dict[str, Any]]()
    for number, (name, form) in enumerate(learning.FORMS.items()):
        files = learning.write_form(tmp_path / str(number), form, most=4)
        options = dict(word.split("=") for word in form.words)
        random = int(options.get("dataset.random_negatives", 0))
        train, held_out = (str(files[split]) for split in ("train", "eval"))
        config = RunConfig(
            dataset=DatasetConfig(name="jsonl", train=train, eval=held_out, random_negatives=random),
            task=TaskConfig(name=options.get("task", "rerank")),
            loss=LossConfig(name=options.get("loss", "cross_entropy")),
        )
        for split in learning.ROWS:
            rows, bad = read_split(config, split)
            alone = form.held_out is not None and split == "train"
            assert (bad, len(rows)) == ([], 12 if alone else 4), name
            if form.query == form.documents == "text" and isinstance(rows[0], Group) and not alone:
                groups = [(row.query, row.documents, row.labels) for row in rows if isinstance(row, Group)]
                said.setdefault(split, {})[name] = groups
        raw = next(iter(raw_rows(config, "train"))).data
        assert not isinstance(raw, BadRow)
        told.add(detect(parse_line(raw) if isinstance(raw, bytes) else raw, config.task.name))
    assert len(said["train"]) == len(said["eval"]) - 1 == 13
    for forms in said.values():
        for name, groups in forms.items():
            assert groups == forms["native"], name
    # Told by their keys these are read as another form, by the same function.
    assert told | {"mteb", "beir", "sharegpt", "visrag"} == set(PARSERS)
