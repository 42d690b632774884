"""Rows that fit no prompt or micro-batch are found by counting tokens, before anything trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.training import processors
from launcher.training.encoding import make_encoder
from launcher.training.formats import Group
from launcher.training.lengths import Lengths, fitting, measure
from tests.groups import group
from tests.tiny import tiny_plan

ROWS = [
    group(("q",), ("a",), ("b",), name="short"),
    group(("long " * 300,), ("a",), ("b",), name="long query"),
    group(("q",), ("long " * 300,), ("b",), name="long document"),  # its end is cut
    group(("q",), *((f"document {i} of many",) for i in range(200)), name="many documents"),
]


@pytest.mark.parametrize(("loss", "unfit"), [("listwise", [1, 3]), ("pointwise", [1])])
def test_what_does_not_fit(loss: str, unfit: list[int], tmp_path: Path) -> None:
    limits = {"max_length": 400, "on_bad": "error"}
    plan = tiny_plan(tmp_path, max_tokens=900, loss={"name": loss}, dataset=limits)
    encoder = make_encoder(plan, processors.load_processor(plan))
    found = Lengths()
    for rank in range(3):  # shares of three ranks add up to the whole
        found.add(measure(plan, encoder, ROWS, range(rank, len(ROWS), 3), "train"))
    assert sorted(found.unfit) == unfit and found.cut == 1
    assert sorted(found.tokens) == [row for row in range(len(ROWS)) if row not in unfit]
    # Held-out rows are scored document by document.
    assert sorted(measure(plan, encoder, ROWS, range(len(ROWS)), "eval").unfit) == [1]

    with pytest.raises(ConfigError, match="row long query: .* dataset.max_length=400") as refused:
        fitting(plan, found, ROWS, "train")
    assert "try  dataset.on_bad=skip" in str(refused.value)

    lenient = dataclasses.replace(plan.config.dataset, on_bad="skip")
    skipping = dataclasses.replace(plan, config=dataclasses.replace(plan.config, dataset=lenient))
    kept: list[Group] = fitting(skipping, found, ROWS, "train")
    assert [one.id for one in kept] == [ROWS[row].id for row in sorted(found.tokens)]
