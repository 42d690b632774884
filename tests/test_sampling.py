"""Which documents of a query a step trains on: properties of the choice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from launcher.errors import ConfigError, MachineError
from launcher.spec import DatasetConfig, RunPlan
from launcher.training.encoding import make_encoder
from launcher.training.pixels import Pixels
from launcher.training.processors import load_processor
from launcher.training.rows import Chat, Content, Group, Image, Row, Turn
from launcher.training.sampling import choose, held_out
from launcher.training.schedule import make_order
from launcher.training.steps import StepMaker, training_steps
from tests.tiny import tiny_plan


def query(name: str, positives: int, negatives: int, *, asked: str | None = None) -> Group:
    documents: tuple[Content, ...] = tuple((f"{name}{i}",) for i in range(positives + negatives))
    labels = (1.0,) * positives + (0.0,) * negatives
    return Group(name, f"f:{name}", None, (asked or name,), documents, labels, tuple(map(float, range(len(labels)))))


ROWS: list[Row] = [query(name, 1 + i % 3, i % 5) for i, name in enumerate("abcdefgh")]
counts = st.none() | st.integers(1, 4)


@settings(max_examples=60)
@given(st.integers(0, 7), counts, counts, st.integers(0, 3), st.integers(0, 5))
def test_a_choice_is_part_of_the_row_and_of_nothing_else_of_it(
    row: int, positives: int | None, negatives: int | None, others: int, epoch: int
) -> None:
    data = DatasetConfig(max_positives=positives, max_negatives=negatives, random_negatives=others)
    whole = ROWS[row]
    assert isinstance(whole, Group)
    chosen = choose(row, ROWS, data, seed=1, epoch=epoch)
    assert isinstance(chosen, Group) and chosen == choose(row, ROWS, data, seed=1, epoch=epoch)
    assert len(set(chosen.documents)) == len(chosen.documents) == len(chosen.labels)
    own = [d for d in chosen.documents if d in whole.documents]
    assert own == sorted(own, key=whole.documents.index) == list(chosen.documents[: len(own)])
    label = dict(zip(whole.documents, whole.labels, strict=True))
    assert all(given == label[doc] for doc, given in zip(own, chosen.labels, strict=False))
    score = dict(zip(whole.documents, whole.scores or (), strict=True))
    assert chosen.scores == (None if others else tuple(score[doc] for doc in own))
    assert sum(map(bool, chosen.labels)) == min(sum(map(bool, whole.labels)), positives or 99)
    assert len(own) - sum(map(bool, chosen.labels)) == min(whole.labels.count(0.0), negatives or 99)
    foreign = chosen.documents[len(own) :]
    assert len(foreign) == others and set(chosen.labels[len(own) :]) <= {0.0}
    right = {d for r in ROWS if isinstance(r, Group) for d, y in zip(r.documents, r.labels, strict=True) if y}
    assert set(foreign) <= right


def test_epochs_seeds_and_rows_choose_differently_and_every_document_has_its_turn() -> None:
    rows = [query("a", 1, 20), query("b", 1, 20)]
    data = DatasetConfig(max_negatives=3)

    def drawn(row: int, seed: int, epoch: int) -> list[str]:
        chosen = choose(row, rows, data, seed=seed, epoch=epoch)
        assert isinstance(chosen, Group)
        return [str(doc[0])[1:] for doc in chosen.documents]

    assert drawn(0, 1, 0) != drawn(0, 1, 1)
    assert drawn(0, 1, 0) != drawn(0, 2, 0)
    assert drawn(0, 1, 0) != drawn(1, 1, 0)
    assert len({name for epoch in range(60) for name in drawn(0, 1, epoch)}) == 21


def test_no_random_negative_answers_the_query() -> None:
    picture: Content = (Image("a.png"),)
    page = Group("p", "f:1", None, ("what?",), (picture,), (1.0,))
    same = Group("s", "f:2", None, ("who?",), (picture,), (1.0,))  # its positive is ours too
    twin = Group("t", "f:3", None, ("what?",), (("other",),), (1.0,))  # the same query with another answer
    other = Group("o", "f:4", None, ("why?",), (("because",),), (1.0,))
    rows: list[Row] = [page, same, twin, other]
    for epoch in range(20):
        chosen = choose(0, rows, DatasetConfig(random_negatives=3), seed=0, epoch=epoch)
        assert isinstance(chosen, Group)
        assert (chosen.documents, chosen.labels) == ((picture, ("because",)), (1.0, 0.0))


def test_held_out_rows_keep_every_document_and_get_negatives_only_when_they_have_none() -> None:
    rows: list[Row] = [query("a", 2, 4), query("b", 1, 0), query("c", 1, 0), query("d", 3, 1)]
    assert held_out(rows, DatasetConfig(max_negatives=1, max_positives=1), seed=0) is rows
    first, again = (held_out(rows, DatasetConfig(random_negatives=2, max_negatives=1), seed=0) for _ in range(2))
    assert first == again
    assert (first[0], first[3]) == (rows[0], rows[3])
    assert [len(row.documents) for row in first if isinstance(row, Group)] == [6, 3, 3, 4]


@pytest.mark.parametrize("epoch", [0, 1])
def test_chats_pass(epoch: int) -> None:
    chat = Chat("1", "f:1", (Turn("user", ("hello",)),))
    assert choose(0, [chat], DatasetConfig(max_negatives=1, random_negatives=1), seed=0, epoch=epoch) is chat


def test_steps_hold_what_was_chosen_and_a_resume_goes_on_alike(tmp_path: Path) -> None:
    """K09."""
    plan = tiny_plan(tmp_path, dataset={"max_negatives": 2, "random_negatives": 1}, batch={"global_size": 4})
    processor = load_processor(plan)
    maker = StepMaker(plan, make_encoder(plan, processor), Pixels(processor), rank=0, padded=True, warn=pytest.fail)
    order = make_order(plan, ROWS)

    def read(first: int) -> list[list[list[int]]]:
        steps = training_steps(maker, ROWS, order, first, 2 * order.steps_per_epoch)
        return [[batch.input_ids.tolist() for batch in step.micro_batches] for step in steps]

    documents = sum(1 + i % 3 + min(i % 5, 2) + 1 for i in range(8))
    steps = training_steps(maker, ROWS, order, 0, order.steps_per_epoch)
    assert sum(len(batch.labels) for step in steps for batch in step.micro_batches) == documents
    whole = read(0)
    assert read(1) == whole[1:] and read(3) == whole[3:]
    first, second = (sorted(t for step in part for ids in step for t in ids) for part in (whole[:2], whole[2:]))
    assert first != second  # the same rows, with other documents


def test_a_mixture_reads_the_sources_off_the_rows(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, dataset={"train": ["a", "b"], "weights": [3.0, 1.0]})
    rows = [dataclasses.replace(row, source=int(i > 1)) for i, row in enumerate(ROWS)]
    order = make_order(plan, rows)
    assert (order.sizes, order.weights, order.rows) == ((2, 6), (3.0, 1.0), 8)
    assert make_order(tiny_plan(tmp_path), rows).weights == ()


def test_a_micro_batch_to_score_is_decoded_when_its_turn_comes(tmp_path: Path) -> None:
    for name in "ab":
        Pillow.new("RGB", (64, 64), "red").save(tmp_path / f"{name}.png")
    rows = [Group(n, f"f:{n}", None, (n,), ((Image(str(tmp_path / f"{n}.png")),),), (1.0,)) for n in "ab"]
    plan = tiny_plan(tmp_path)
    processor = load_processor(plan)
    encoder = make_encoder(plan, processor)
    plan = tiny_plan(tmp_path, max_tokens=encoder.encode(rows[0]).tokens)  # one row fits
    maker = StepMaker(plan, encoder, Pixels(processor), rank=0, padded=True, warn=pytest.fail)
    batches = maker.scoring(rows)
    assert next(batches).pixel_values is not None
    (tmp_path / "b.png").unlink()
    with pytest.raises(ConfigError, match=r"b\.png"):
        next(batches)


def test_a_picture_that_vanishes_ends_a_run_on_several_hosts(tmp_path: Path) -> None:
    """Others may still see it, and would divide the batch in another way."""
    path = tmp_path / "a.png"
    Pillow.new("RGB", (64, 64), "red").save(path)
    rows = [Group("a", "f:1", None, ("a",), ((Image(str(path)),),), (1.0,))]
    plan = tiny_plan(tmp_path)
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, dataset=skipping(plan.config.dataset)))
    processor, warned = load_processor(plan), list[str]()
    encoder = make_encoder(plan, processor)
    path.unlink()

    def maker(plan: RunPlan) -> StepMaker:
        return StepMaker(plan, encoder, Pixels(processor), rank=0, padded=True, warn=warned.append)

    assert maker(plan).training(rows).units == 0 and "a.png" in warned[0]
    with pytest.raises(MachineError, match=r"a\.png"):
        maker(dataclasses.replace(plan, hosts=plan.hosts * 2)).training(rows)


def skipping(dataset: DatasetConfig) -> DatasetConfig:
    return dataclasses.replace(dataset, on_bad="skip")
