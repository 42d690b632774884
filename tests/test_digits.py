"""The embedded data: real digits, held-out images apart, groups fixed by the seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

from launcher.training.digits import DATA, EVAL_GROUPS, TRAIN_GROUPS, WORDS, read_digits
from launcher.training.images import open_image


def test_groups() -> None:
    train, held_out = read_digits("train", seed=1), read_digits("eval", seed=1)
    assert (len(train), len(held_out)) == (TRAIN_GROUPS, EVAL_GROUPS)
    assert EVAL_GROUPS >= 200
    for groups in (train, held_out):
        assert {len(set(group.documents)) for group in groups} == {8}
        assert {group.labels for group in groups} == {(1.0, *(0.0,) * 7)}
        assert len({group.id for group in groups}) == len(groups)
        assert set(Counter(group.query for group in groups)) == {(f"the digit {word}",) for word in WORDS}
    seen = {document for group in train for document in group.documents}
    assert len(seen) > 1300
    assert not seen & {document for group in held_out for document in group.documents}


def test_groups_follow_the_seed_and_held_out_ones_do_not() -> None:
    assert read_digits("train", seed=1, max_rows=5) == read_digits("train", seed=1)[:5]
    assert read_digits("train", seed=1, max_rows=5) != read_digits("train", seed=2, max_rows=5)
    assert read_digits("eval", seed=1) == read_digits("eval", seed=2)


def test_pictures_show_what_the_labels_say() -> None:
    source = load_digits()
    truth = {tuple(values): int(label) for values, label in zip(source.data.astype(int), source.target, strict=True)}
    for row, group in enumerate(read_digits("eval", seed=1)[:40]):
        pixels = [np.asarray(open_image(image)) for (image,) in group.documents]
        assert {values.shape for values in pixels} == {(64, 64, 3)}
        shown = [truth[tuple((values[::8, ::8, 0].reshape(-1).astype(int) * 16 + 254) // 255)] for values in pixels]
        assert shown[0] == row % 10
        assert shown[0] not in shown[1:]
        assert len(set(shown)) == 8


def test_the_file_carries_its_licence() -> None:
    metadata = pq.read_schema(DATA).metadata
    assert metadata[b"license"].startswith(b"CC BY 4.0")
    assert b"Alpaydin" in metadata[b"creators"]
    assert DATA.stat().st_size < 100_000
