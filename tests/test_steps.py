"""Micro-batches made ahead: the same for any number of threads, a rank's own rows alone, errors and ends as without."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from launcher.errors import ConfigError
from launcher.spec import Host, RunPlan
from launcher.training.batching import MicroBatch, Unit, make_units
from launcher.training.encoding import Encoded, make_encoder
from launcher.training.images import known_size
from launcher.training.outlines import outlines_of
from launcher.training.pixels import Pixels
from launcher.training.prepare import Prepared, prepare
from launcher.training.processors import load_processor
from launcher.training.rows import Group, Row
from launcher.training.sampling import choose
from launcher.training.schedule import make_order
from launcher.training.steps import Step, StepMaker, scoring_batches, training_steps
from launcher.training.workers import MOST, Ahead, Here, data_workers, threads
from tests.groups import GROUPS, group, packed
from tests.tiny import tiny_plan

WORDS = ["red", "green", "blue", "door", "house", "street", "letter", "number", "market", "river", "winter", "summer"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan_on(tmp_path: Path, **data: Any) -> RunPlan:
    """Rows with a picture and texts of many lengths, several micro-batches a step."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(12):
        Pillow.fromarray(rng.integers(0, 256, (40 + i, 90, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        texts = [" ".join(rng.choice(WORDS, n)) for n in rng.integers(2, 30, 2 + i % 3)]
        rows.append({"query": f"{WORDS[i]} and", "positives": [{"image": f"{i}.png"}], "negatives": texts})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = tiny_plan(tmp_path / "run", dataset={"train": str(path), **data}, batch={"global_size": 6})
    return dataclasses.replace(made, batch=dataclasses.replace(made.batch, max_tokens=500))


def on_ranks(plan: RunPlan, count: int) -> RunPlan:
    return dataclasses.replace(plan, hosts=(Host(name="localhost", gpus=tuple(range(count))),))


class Counting:
    """An encoder that notes the rows it is asked for."""

    def __init__(self, plan: RunPlan, processor: Any) -> None:
        self.encoder, self.asked = make_encoder(plan, processor), list[str]()

    def encode(self, row: Row) -> Encoded:
        self.asked.append(row.id)
        return self.encoder.encode(row)


def maker_of(plan: RunPlan, *, rank: int = 0, warned: list[str] | None = None) -> StepMaker:
    processor = load_processor(plan)
    warn = pytest.fail if warned is None else warned.append
    return StepMaker(plan, Counting(plan, processor), Pixels(processor, 0), rank=rank, padded=True, warn=warn)


def all_of(maker: StepMaker, rows: Prepared | list[Row], steps: int = 3) -> list[Step]:
    order = make_order(maker.plan, rows)
    return [step.held() for step in training_steps(maker, rows, order, 0, steps)]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors(one)
    elif dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            yield from tensors(getattr(value, one.name))


def assert_same(left: Any, right: Any) -> None:
    pairs = list(itertools.zip_longest(tensors(left), tensors(right)))
    assert len(pairs) > 20 and all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


@pytest.mark.parametrize("drawn", [{}, {"max_negatives": 2}, {"random_negatives": 1}])
def test_any_number_of_threads_makes_the_same_micro_batches(tmp_path: Path, drawn: dict[str, int]) -> None:
    plan = plan_on(tmp_path, **drawn)
    rows = prepare(plan, "train")
    found = []
    for workers in (1, 5):
        data = dataclasses.replace(plan.config.dataset, workers=workers)
        maker = maker_of(dataclasses.replace(plan, config=dataclasses.replace(plan.config, dataset=data)))
        found.append(all_of(maker, rows))
    assert_same(*found)
    for step, other in zip(*found, strict=True):
        assert dataclasses.replace(step, micro_batches=()) == dataclasses.replace(other, micro_batches=())
    order = make_order(plan, rows)
    for step, whole in enumerate(found[0]):
        assert whole.micro_steps > 1 and whole.sees
        epoch = order.epoch(step)
        chosen = [choose(int(row), rows, plan.config.dataset, seed=42, epoch=epoch) for row in order.batch(step)]
        here = maker_of(plan).training(chosen)
        assert (here.units, here.groups) == (whole.units, whole.groups) == (6, 6)
        if not drawn:  # with a draw prepared lengths say no less than what is there, and may divide otherwise
            assert_same(here, whole)


def test_ranks_tokenise_their_own_rows_and_train_on_all(tmp_path: Path) -> None:
    plan = on_ranks(plan_on(tmp_path, max_negatives=2), 2)
    rows = prepare(plan, "train")
    makers = [maker_of(plan, rank=rank) for rank in range(2)]
    steps = [all_of(maker, rows, 2) for maker in makers]
    for maker in makers:
        assert len(maker.encoder.asked) < len(rows)  # type: ignore[attr-defined]
    asked = [name for maker in makers for name in maker.encoder.asked]  # type: ignore[attr-defined]
    assert sorted(asked) == sorted(row.id for row in rows)
    for one, two in zip(*steps, strict=True):
        assert one.micro_steps == two.micro_steps and one.units + two.units == 6
        batches = [*one.micro_batches, *two.micro_batches]
        assert sorted({g for b in batches for g in b.group.tolist()}) == list(range(6))
        assert one.tokens == sum(batch.tokens for batch in one.micro_batches)
        assert max(batch.tokens for batch in batches) <= plan.batch.max_tokens


def test_outlines_are_those_of_the_tokenised_rows(tmp_path: Path) -> None:
    plan = plan_on(tmp_path)
    rows = prepare(plan, "train")
    outlines, encoder = outlines_of(rows, plan), make_encoder(plan, load_processor(plan))
    assert outlines is not None
    for number, row in enumerate(rows):
        wanted = encoder.encode(row).outline(plan.cost)
        for found in (outlines.whole(number), outlines.chosen(number, epoch=3)):
            assert (found.prefix, found.lengths) == (wanted.prefix, wanted.lengths)
            assert found.cost == pytest.approx(wanted.cost)
    drawn = plan_on(tmp_path, max_negatives=1)
    outlines = outlines_of(prepare(drawn, "train"), drawn)
    assert outlines is not None
    for number in range(len(rows)):
        chosen = encoder.encode(choose(number, rows, drawn.config.dataset, seed=42, epoch=1))
        found = outlines.chosen(number, epoch=1)
        assert found.lengths == tuple(map(len, chosen.prompts)) and found.tokens >= chosen.tokens


def test_lengths_are_not_known_of_drawn_documents_and_segments(tmp_path: Path) -> None:
    plan = plan_on(tmp_path)
    rows = prepare(plan, "train")
    assert outlines_of(list(rows), plan) is None
    for more in ({"random_negatives": 2}, {"video": {"segment_s": 4.0}}):
        assert outlines_of(rows, plan_on(tmp_path, **more)) is None


def test_scoring_gives_every_document_once(tmp_path: Path) -> None:
    plan = on_ranks(plan_on(tmp_path), 2)
    rows = prepare(plan, "train")
    seen, counts = [], []
    for rank in range(2):
        batches = list(scoring_batches(maker_of(plan, rank=rank), rows, 5))
        seen += [
            (first + g, d) for first, b in batches for g, d in zip(b.group.tolist(), b.document.tolist(), strict=True)
        ]
        counts.append([first for first, _ in batches])
    assert counts[0] == counts[1] and set(counts[0]) == {0, 5, 10}
    assert sorted(seen) == [(i, d) for i, row in enumerate(rows) for d in range(len(row.documents))]  # type: ignore[union-attr]


@pytest.mark.parametrize("workers", [1, 4])
def test_a_file_that_is_gone_ends_the_run_or_is_left_out(tmp_path: Path, workers: int) -> None:
    plan = plan_on(tmp_path, workers=workers)
    rows = prepare(plan, "train")
    (tmp_path / "7.png").write_bytes((tmp_path / "7.png").read_bytes()[:200])  # its size can still be read
    with pytest.raises(ConfigError, match=r"rows\.jsonl:8: row .*7\.png"):
        all_of(maker_of(plan), rows)
    skipping = plan_on(tmp_path, workers=workers, on_bad="skip")
    (tmp_path / "7.png").write_bytes((tmp_path / "7.png").read_bytes()[:200])
    warned = list[str]()
    steps = all_of(maker_of(skipping, warned=warned), rows, 2)
    assert len(warned) == 1 and "7.png" in warned[0]
    assert [step.units for step in steps] in ([5, 6], [6, 5])
    assert sum(step.groups for step in steps) == 11
    labels = [label for step in steps for batch in step.micro_batches for label in batch.labels.tolist()]
    assert sum(labels) == 11


def test_a_picture_of_another_size_than_prepared_is_told(tmp_path: Path) -> None:
    plan = plan_on(tmp_path)
    rows = prepare(plan, "train")
    Pillow.new("RGB", (64, 600)).save(tmp_path / "3.png")
    known_size.cache_clear()  # another process would not know what it was
    with pytest.raises(ConfigError, match=r"rows\.jsonl:4: row .* when the rows were prepared"):
        all_of(maker_of(plan), rows)


def test_few_results_are_made_ahead_and_come_in_order() -> None:
    begun: list[int] = []

    def source(pool: Any) -> Iterator[Any]:
        for number in range(8):
            yield f"mark {number}"
            begun.append(number)
            yield pool.submit(lambda number=number: number)

    with threads(2, torch.device("cpu")) as (planner, pool):
        ahead: Ahead[str, int] = Ahead(source(pool), planner, depth=2)
        for number in range(8):
            assert ahead.mark() == f"mark {number}"
            assert len(begun) <= number + 2
            assert ahead.result() == number
        assert ahead.mark() is None and ahead.mark() is None


def test_errors_come_where_the_result_would_have_and_no_thread_is_left() -> None:
    def failing(pool: Any) -> Iterator[Any]:
        yield "a"
        yield pool.submit(lambda: 1)
        yield pool.submit(lambda: 1 / 0)
        raise ValueError("no plan")

    before = threading.active_count()
    with threads(3, torch.device("cpu")) as (planner, pool):
        ahead: Ahead[str, int] = Ahead(failing(pool), planner)
        assert (ahead.mark(), ahead.result()) == ("a", 1)
        with pytest.raises(ZeroDivisionError):
            ahead.result()
        for _ in range(2):
            with pytest.raises(ValueError, match="no plan"):
                ahead.mark()
    assert threading.active_count() == before


def test_steps_that_are_dropped_leave_no_thread(tmp_path: Path) -> None:
    plan = plan_on(tmp_path, workers=3)
    rows = prepare(plan, "train")
    before = threading.active_count()
    steps = training_steps(maker_of(plan), rows, make_order(plan, rows), 0, 1000)
    next(iter(next(steps).micro_batches))
    assert threading.active_count() > before
    steps.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_work_done_here_is_done_at_once() -> None:
    done: Future[int] = Here().submit(lambda a, b: a + b, 1, 2)
    assert done.done() and done.result() == 3


def test_workers_are_a_ranks_processors_but_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny_plan(tmp_path)
    for told, wanted in (("1", 1), ("2", 1), ("9", 8), ("99", MOST)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert data_workers(plan) == wanted
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(40)))
    assert data_workers(on_ranks(plan, 8)) == 4
    assert data_workers(plan_on(tmp_path, workers=3)) == 3


def test_prefixes_come_first_and_a_groups_documents_side_by_side(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path)
    processor = load_processor(plan)
    alone = group(("one",), ("document",), name="alone")
    rows: list[Group] = [*GROUPS["image query"], alone, *GROUPS["mixed"], *GROUPS["text"]]
    encoded = [make_encoder(plan, processor).encode(row) for row in rows]
    batch: MicroBatch = packed(processor, encoded, make_units(encoded, plan.cost, 8192, splittable=False))
    prefixes = [e.prompts[0].ids[: e.prefix] for e in encoded]
    documents = [prompt.ids[e.prefix :] for e in encoded for prompt in e.prompts]
    assert encoded[1].prefix == 0 and sum(map(bool, (e.prefix for e in encoded))) > 3
    assert batch.input_ids.tolist() == np.concatenate([*prefixes, *documents]).tolist()
    ends = np.cumsum([len(ids) for ids in documents]) + sum(map(len, prefixes)) - 1
    assert batch.last.tolist() == ends.tolist()
    assert batch.visual_rows is not None and (batch.visual_rows.diff() > 0).all()
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert batch.visual_rows.tolist() == torch.nonzero(batch.input_ids == pad)[:, 0].tolist()


def test_counts_of_a_share_are_those_of_its_micro_batches(tmp_path: Path) -> None:
    """The loss's divisor is known before a micro-batch is made; sft counts answers."""
    plan = tiny_plan(tmp_path, task={"name": "sft"}, loss={"name": "cross_entropy"}, max_tokens=300)
    processor = load_processor(plan)
    maker = StepMaker(plan, make_encoder(plan, processor), Pixels(processor), rank=0, padded=True, warn=pytest.fail)
    step = maker.training([*GROUPS["text"], *GROUPS["image query"]])
    batches = list(step.micro_batches)
    assert step.units == sum(len(batch.predicted) for batch in batches) == 10 * 2
    assert step.tokens == sum(batch.tokens for batch in batches) and step.micro_steps == len(batches) > 1
    for batch in batches:
        assert torch.equal(batch.input_ids[batch.predicting + 1], batch.predicted)
    assert Unit(0, (0,), 1, 1.0).longest == 0
