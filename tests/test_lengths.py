"""Rows that fit no prompt or micro-batch are found by counting tokens, before anything trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.training import processors
from launcher.training.encoding import make_encoder
from launcher.training.lengths import join, measure, too_many
from launcher.training.rows import too_large
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
    found = join([measure(encoder, ROWS[at : at + 3], 400) for at in range(0, len(ROWS), 3)])
    assert sorted(found.unfit) == [1] and found.unfit[1].startswith("test:1: row long query: ")
    assert found.cut.tolist() == [0, 0, 1, 0]
    assert found.count.tolist() == [2, 0, 2, 200] and found.positives.tolist() == [1, 0, 1, 1]
    encoded = encoder.encode(ROWS[2])
    assert found.prefix[2] == encoded.prefix and found.tokens[2] == encoded.tokens
    assert found.own(2).tolist() == [len(prompt) - encoded.prefix for prompt in encoded.prompts]
    # Held-out rows are scored document by document.
    assert too_many(plan, ROWS, found, "eval") == {}
    more = too_many(plan, ROWS, found, "train")
    assert sorted({*found.unfit, *more}) == unfit
    if more:
        assert f"200 documents need {found.tokens[3]} tokens in one micro-batch and batch.max_tokens=900" in more[3]
    assert "it needs 40 tokens" in too_large(ROWS[0], 1, 40, 16) and "documents" not in too_large(ROWS[0], 1, 40, 16)


@pytest.mark.parametrize(("drawn", "fits"), [({"max_negatives": 20}, True), ({"max_negatives": 120}, False)])
def test_documents_that_are_drawn_count_at_their_longest(drawn: dict[str, int], fits: bool, tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, max_tokens=900, loss={"name": "listwise"}, dataset=drawn)
    encoder = make_encoder(plan, processors.load_processor(plan))
    found = measure(encoder, ROWS[3:], 1024)
    own = found.own(0)
    assert found.tokens[0] > 900
    assert (too_many(plan, ROWS[3:], found, "train") == {}) == fits
    needed = found.prefix[0] + own[0] + sorted(own[1:])[-drawn["max_negatives"] :][0] * drawn["max_negatives"]
    assert (needed <= 900) == fits  # all documents of the row are about equally long
    with_others = tiny_plan(
        tmp_path, max_tokens=900, loss={"name": "listwise"}, dataset={**drawn, "random_negatives": 99}
    )
    assert too_many(with_others, ROWS[3:], found, "train")
