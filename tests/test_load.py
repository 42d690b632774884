"""What rows hold is counted once; loads of steps and micro-batches follow from it, value by value."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.estimates import Load
from launcher.planning.load import micro_load, step_load
from launcher.planning.shapes import read_shape
from launcher.prepared import QUANTITIES, read_summary
from launcher.spec import RunPlan
from launcher.training.batching import MicroBatch, Unit, make_units, split_step
from launcher.training.counts import load_summary
from launcher.training.encoding import Encoded, make_encoder
from launcher.training.lengths import join, measure
from launcher.training.prepare import prepare
from launcher.training.processors import load_processor
from launcher.training.rows import Chat, Row, Turn
from tests.groups import GROUPS, group, packed, picture
from tests.planning_support import compose
from tests.tiny import in_family, tiny_plan

CHATS = [
    Chat("c1", "test:1", (Turn("user", ("hello", picture(1))), Turn("assistant", ("a red ring",), True))),
    Chat("c2", "test:2", (Turn("user", ("why?",)), Turn("assistant", ("because it is",), True), Turn("user", ("ah",)))),
]
ROWS: dict[str, Sequence[Row]] = {
    "groups": [*GROUPS["text"], *GROUPS["mixed"], *GROUPS["image query"]],
    "pictures": GROUPS["image documents"],
    "chats": CHATS,
}


def held(processor: Any, encoded: Sequence[Encoded], units: Sequence[Unit]) -> dict[str, float]:
    """What a packed micro-batch holds, counted from its tensors."""
    batch: MicroBatch = packed(processor, encoded, units)
    grids = [] if batch.grid_thw is None else batch.grid_thw.tolist()
    return {
        "tokens": batch.tokens,
        "visual": 0 if batch.visual_rows is None else len(batch.visual_rows),
        "patches": sum(t * h * w for t, h, w in grids),
        "key_rows": 0 if batch.layout.key_rows is None else len(batch.layout.key_rows),
        "documents": len(batch.last),
        "answers": len(batch.predicted),
        "pairs": sum(int((part.mask[:, 0] & part.real[:, :, None]).sum()) for part in batch.layout.padded),
        "patch_pairs": sum(t * (h * w) ** 2 for t, h, w in grids),
    }


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., tuple[RunPlan, Any, list[Encoded], dict[str, Any]]]:
    """A plan, its processor, rows as prompts, and what RunPlan.data says of them."""

    def count(rows: Sequence[Row], **config: Any) -> tuple[RunPlan, Any, list[Encoded], dict[str, Any]]:
        plan = tiny_plan(tmp_path, **{"batch": {"global_size": 1}, **config})
        processor = load_processor(plan)
        encoder = make_encoder(plan, processor)
        lengths = join([measure(encoder, rows[at : at + 2], 1024) for at in range(0, len(rows), 2)])
        data = json.loads(json.dumps({"train": {"lengths": {"load": load_summary(lengths)}}}))
        return plan, processor, [encoder.encode(row) for row in rows], data

    return count


def step_of(plan: RunPlan, data: dict[str, Any], *, world: int = 1, max_tokens: int = 8192) -> tuple[Load, int, str]:
    return step_load(plan.config, read_shape(plan.config.model, plan.arch), data, world, max_tokens)


def assert_holds(load: Load, expected: dict[str, float]) -> None:
    """Whole numbers are rounded up."""
    found = asdict(load)
    assert list(found) == list(QUANTITIES)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value) if "pairs" in name else found[name] - 1 < value <= found[name], name


@pytest.mark.parametrize("kind", ROWS)
def test_a_step_holds_what_its_packed_rows_hold(kind: str, measured: Any) -> None:
    sft = {"task": {"name": "sft", "instruction": None}, "loss": {"name": "cross_entropy"}}
    plan, processor, encoded, data = measured(ROWS[kind], **(sft if kind == "chats" else {}))
    rows = [held(processor, [one], make_units([one], plan.cost, 8192, splittable=False)) for one in encoded]
    # Keys are gathered for all rows of a micro-batch in which one row shares a prefix.
    for row in rows if any(row["key_rows"] for row in rows) else []:
        row["key_rows"] = row["key_rows"] or row["tokens"]
    load, _, said = step_of(plan, data)
    assert_holds(load, {name: sum(row[name] for row in rows) / len(rows) for name in QUANTITIES})
    assert said == f"lengths of the {len(rows)} training rows"
    if kind == "chats":
        assert load.answers > 0 and load.visual > 0
    else:
        assert load.key_rows > load.tokens


def test_documents_that_are_drawn_count_by_their_chance(measured: Any) -> None:
    rows = [
        group(("q",), ("yes",), *((f"document {'word ' * n}",) for n in range(4))),
        group(("why",), ("because",), (picture(1),), ("no",)),
    ]
    limits = {"max_negatives": 2, "max_length": 1024}
    plan, processor, encoded, data = measured(rows, dataset=limits)
    means = []
    for one in encoded:
        chosen = itertools.combinations(range(1, len(one.prompts)), 2)
        held_by = [held(processor, [one], [Unit(0, (0, *drawn), 0, 0.0)]) for drawn in chosen]
        means.append({name: np.mean([h[name] for h in held_by]) for name in QUANTITIES})
    load, _, _ = step_of(plan, data)
    assert_holds(load, {name: float(np.mean([mean[name] for mean in means])) for name in QUANTITIES})
    more = replace(plan, config=replace(plan.config, dataset=replace(plan.config.dataset, random_negatives=3)))
    assert step_of(more, data)[0].documents == load.documents + 3


def test_many_kinds_of_rows_are_summed_up(measured: Any) -> None:
    rows = [group(("q",), *((f"document {i}",) for i in range(count))) for count in range(1, 50)]
    plan, _, encoded, data = measured(rows)
    assert len(data["train"]["lengths"]["load"]["kinds"]) == 32
    assert_holds(step_of(plan, data)[0], {"tokens": sum(one.tokens for one in encoded) / 49, "documents": 25})


def steps_of(plan: RunPlan, encoded: Sequence[Encoded], world: int, limit: int) -> Iterator[list[list[list[Unit]]]]:
    """Divisions of random batches over ranks and micro-steps."""
    random = np.random.default_rng(0)
    for _ in range(40):
        chosen = [encoded[i] for i in random.permutation(len(encoded))[: plan.config.batch.global_size]]
        yield split_step(make_units(chosen, plan.cost, limit, splittable=False), [1.0] * world, limit)


@pytest.mark.parametrize(("world", "limit"), [(1, 400), (2, 400), (3, 250), (4, 8192)])
@pytest.mark.parametrize("alike", [True, False])
def test_no_micro_batch_is_fuller_than_foretold(alike: bool, world: int, limit: int, measured: Any) -> None:
    lengths = [20] * 12 if alike else range(2, 50, 4)
    rows = [group(("q",), ("red " * n,), ("blue " * n,)) for n in lengths]
    plan, _, encoded, data = measured(rows, batch={"global_size": 8})
    shape = read_shape(plan.config.model, plan.arch)
    found = micro_load(plan.config, shape, data, limit, world=world)
    load, steps, _ = step_of(plan, data, world=world, max_tokens=limit)
    divided = list(steps_of(plan, encoded, world, limit))
    fullest = max(sum(unit.tokens for unit in micro) for ranks in divided for rank in ranks for micro in rank)
    assert fullest <= found.tokens <= limit
    if alike:
        assert found.tokens == fullest
        assert {len(rank) for ranks in divided for rank in ranks} == {steps}
        assert load.tokens == 8 * encoded[0].tokens
    else:
        assert abs(np.mean([len(ranks[0]) for ranks in divided]) - steps) < 1


def test_what_is_assumed_before_rows_are_read(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path)
    load, steps, said = step_of(plan, {}, max_tokens=4096)
    assert said.startswith("assumed: a query with 8 documents, each prompt as long as dataset.max_length=1024, all of")
    assert load.visual == load.tokens == 4 * (512 + 8 * 512) and load.patches == 4 * load.tokens and steps == 5
    text = in_family(plan, "qwen3")
    full = micro_load(text.config, read_shape(text.config.model, text.arch), {}, 4096)
    assert (full.tokens, full.visual, full.patches) == (4096, 0, 0) and full.key_rows > 4096
    # Summaries of earlier versions know nothing of loads.
    assert step_of(text, {"train": {"lengths": {"mean": 3.0}}})[2].startswith("assumed: ")


@pytest.mark.parametrize("words", [["dataset=digits"], ["dataset=jsonl", "dataset.train=rows.jsonl"]])
def test_prepared_rows_tell_their_load(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    row = {"query": "a query", "positives": ["right"], "negatives": ["wrong", "no"]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "id": f"r{i}"}) + "\n" for i in range(3)))
    config = compose("model=tiny", *words, "dataset.max_rows=3", "eval.every_steps=null", "eval.at_start=false")
    plan = replace(tiny_plan(tmp_path), config=config)
    first = prepare(plan, "train").summary()
    assert prepare(plan, "train").summary() == first, "what was written is read back"
    known = read_summary(config)
    assert known["train"] == first
    load, _, said = step_of(plan, known)
    assert said == "lengths of the 3 training rows" and load.tokens > 0
    if "digits" in words[0]:
        alone = step_of(plan, {})[0]
        assert 0 < load.patches < alone.patches, "a step of many rows out of three shows pictures again"
        assert replace(alone, patches=load.patches, patch_pairs=load.patch_pairs) == load
        assert micro_load(config, read_shape(config.model, config.model.arch), {}, 512) == micro_load(
            config, read_shape(config.model, config.model.arch), known, 512
        )


@pytest.mark.parametrize(("queries", "rows"), [("text", 4), ("text", 8), ("image", 8)])
def test_pictures_that_rows_of_a_micro_batch_share_pass_the_tower_once(queries: str, rows: int, tmp_path: Path) -> None:
    rng, pages, micro_batches = np.random.default_rng(0), 24, 400
    each = 5 if queries == "image" else 4
    drawn = [len({p for _ in range(rows) for p in rng.choice(pages, each, False)}) for _ in range(micro_batches)]
    row = [500, 400, 1600 * each, 900, 4, 0, 9e5, 2e6 * each]  # of QUANTITIES
    nothing = [0] * len(QUANTITIES)
    lengths = {"load": {"kinds": [[1, 3, 64, [64 * n for n in row], nothing, nothing]]}}
    shown = {"queries": {queries: 64}, "documents": {"image": 200, "mixed": 56}}
    train = {"rows": 64, "documents": 256, "images": pages, "modality": shown, "lengths": lengths}
    plan = tiny_plan(tmp_path, batch={"global_size": 2 * rows})
    shape = read_shape(plan.config.model, plan.arch)
    apart = step_load(plan.config, shape, {"train": {**train, "images": 0}}, 1, rows * 500)
    load, micro_steps, _ = step_load(plan.config, shape, {"train": train}, 1, rows * 500)
    assert micro_steps == apart[1] == 2 and apart[0].patches == 2 * rows * row[2]
    share = load.patches / apart[0].patches
    assert share == pytest.approx(sum(drawn) / micro_batches / rows / each, rel=0.02)
    assert load.patch_pairs / apart[0].patch_pairs == pytest.approx(share, rel=1e-3) and load.tokens == apart[0].tokens
