"""Training that goes wrong is told early: bad steps, weights without a gradient, ranks that begin differently."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from launcher.errors import ExitCode, TrainingError
from launcher.families import FAMILIES
from launcher.spec import LossConfig, RunConfig, TrainConfig
from launcher.training import health, processors
from launcher.training.batching import MicroBatch
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.pixels import Pixels
from launcher.training.runtime import Rank
from launcher.training.steps import StepMaker
from tests.groups import GROUPS
from tests.tiny import tiny_plan

NAN = math.nan


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rank]:
    store = f"file://{tmp_path_factory.mktemp('store') / 'file'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield Rank(0, 1, torch.device("cpu"), dist.group.WORLD)
    dist.destroy_process_group()


def bad_steps(precision: str = "bf16", **loss: Any) -> health.BadSteps:
    config = RunConfig(train=TrainConfig(max_bad_steps=3), loss=LossConfig(**{"name": "listwise", **loss}))
    return health.BadSteps(config, precision, 1e-4)


@pytest.mark.parametrize(
    ("losses", "stops_at", "words"),
    [
        ([1.0, NAN, NAN, NAN, NAN], 4, "the loss is nan"),
        ([math.inf, NAN, 1.0, NAN, -math.inf, 1.0], None, ""),
        ([0.0, 0.0, 0.0], 3, "the loss is exactly 0"),
        ([0.5, 0.0, 0.0, 0.1], None, ""),
    ],
)
def test_bad_steps_in_a_row_end_a_run(losses: list[float], stops_at: int | None, words: str) -> None:
    """G01, G08."""
    bad, raised = bad_steps(), None
    for step, loss in enumerate(losses, start=1):
        fault = bad.note(step, loss, 4, skipped=False)
        try:
            bad.check(fault, None, whole_run=False)
        except TrainingError as error:
            raised = error
            break
    assert (step if raised else None) == stops_at
    if raised:
        assert raised.exit_code == ExitCode.TRAINING
        assert words in str(raised) and "3 steps in a row" in str(raised) and "     try  " in str(raised)
    assert bad.total == sum(not math.isfinite(loss) or loss == 0 for loss in losses[:stops_at])


def test_a_loss_that_may_be_zero_is_only_warned_of() -> None:
    for name, wanted in (("custom", 1), ("listwise", 0)):
        bad = bad_steps(name=name)
        losses = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        said = [text for step, loss in enumerate(losses, start=1) if (text := bad.idle(step, loss, 4))]
        assert len(said) == wanted and all("step 6: the loss was exactly 0 for 3 steps" in text for text in said)
    assert bad_steps(name="custom").note(1, 0.0, 4, skipped=False) is None


def test_bad_steps_are_counted_across_a_resume() -> None:
    bad, again = bad_steps(), bad_steps()
    for step in (1, 2):
        bad.check(bad.note(step, NAN, 4, skipped=False), None, whole_run=False)
    again.go_on(bad.saved())
    with pytest.raises(TrainingError, match="3 steps in a row"):
        again.check(again.note(3, NAN, 4, skipped=False), None, whole_run=False)
    again.go_on({})
    assert (again.total, again.in_a_row) == (0, 0)


def test_skipped_steps_of_fp16_say_where_the_loss_scale_is() -> None:
    """G03."""
    bad = bad_steps("fp16")
    for step in (1, 2):
        bad.check(bad.note(step, 0.7, 4, skipped=True), 4.0, whole_run=False)
    fault = bad.note(3, 0.7, 4, skipped=True)
    with pytest.raises(TrainingError, match=r"loss scale is down to 2(.|\n)*try  precision=bf16"):
        bad.check(fault, 2.0, whole_run=False)


def test_a_loss_of_0_may_be_right() -> None:
    assert bad_steps(name="pairwise", form="margin").note(1, 0.0, 4, skipped=False) is None
    bad = bad_steps()
    most = bad.config.train.max_bad_steps
    for step in range(1, most):  # rows whose pictures broke after they were checked
        bad.check(bad.note(step, 0.0, 0, skipped=False), None, whole_run=True)
    with pytest.raises(TrainingError, match=f"{most} steps in a row taught the model nothing; .* none of its rows"):
        bad.check(bad.note(most, 0.0, 0, skipped=False), None, whole_run=False)
    bad = bad_steps()
    fault = bad.note(1, NAN, 4, skipped=False)
    with pytest.raises(TrainingError):  # shorter than max_bad_steps, and nothing else in the whole run
        bad.check(fault, None, whole_run=True)


def first_step(plan: Any, names: tuple[str, ...], spoil: Any = None) -> Any:
    """The watch and micro-batches of one backward pass of these groups."""
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    if spoil:
        spoil(scorer)
    watch = health.GradientWatch(scorer, FAMILIES["qwen3_vl"])
    maker = StepMaker(plan, make_encoder(plan, processor), Pixels(processor), rank=0, padded=True, warn=print)
    batches = list(maker.training([one for name in names for one in GROUPS[name]]).micro_batches)

    def step() -> list[MicroBatch]:
        for batch in batches:
            (scorer(batch) * (batch.labels - 0.4)).sum().backward()
        return batches

    return watch, step


def sees(batches: list[MicroBatch]) -> bool:
    return any(batch.pixel_values is not None for batch in batches)


LORA = {"name": "lora", "language": "lora", "vision": "lora", "projector": "full"}


def test_everything_that_trains_gets_a_gradient(tmp_path: Path, rank: Rank) -> None:
    watch, step = first_step(tiny_plan(tmp_path, tune=LORA), ("text", "image documents"))
    assert any(".lora_B." in name for name in watch.waiting) and not any(".lora_A." in name for name in watch.waiting)
    assert watch.after_step(rank, sees(step()), 0.5) is None
    assert not watch.waiting


def test_without_images_the_tower_is_waited_for_and_then_warned_of(tmp_path: Path, rank: Rank) -> None:
    watch, step = first_step(tiny_plan(tmp_path, tune=LORA), ("text",))
    batches = step()
    assert watch.after_step(rank, sees(batches), 0.5) is None
    assert {watch._part(name) for name in watch.waiting} == {"vision", "projector"}
    said = [watch.after_step(rank, sees(batches), 0.5) for _ in range(health.STEPS_WITHOUT_IMAGES)]
    assert [text for text in said if text] == [
        "no image in 20 steps: projector and vision, which should train, learn nothing"
    ]


def reentrant(scorer: Any) -> None:
    """What others did: checkpointing that loses gradients behind frozen embeddings; the last layers learn."""
    for layer in scorer.core.language_model.layers[:2]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)


def cut(scorer: Any) -> None:
    """The tower's features lose their graph."""
    scorer.core.visual.register_forward_hook(lambda module, args, out: _detached(out))


def _detached(out: Any) -> Any:
    out.pooler_output = out.pooler_output.detach()
    out.deepstack_features = [f.detach() for f in out.deepstack_features]
    return out


def test_images_that_nothing_depends_on_are_warned_of(tmp_path: Path, rank: Rank) -> None:
    """I19."""
    plan = tiny_plan(tmp_path)
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    maker = StepMaker(plan, make_encoder(plan, processor), Pixels(processor), rank=0, padded=True, warn=print)
    words, images = (maker.training(GROUPS[name]).micro_batches for name in ("text", "image documents"))
    assert health.unseen_pixels(scorer, words, rank) is None
    assert health.unseen_pixels(scorer, images, rank) is None
    scorer.core.visual.register_forward_pre_hook(lambda module, args: (torch.zeros_like(args[0]), *args[1:]))
    assert "does it see them" in (health.unseen_pixels(scorer, images, rank) or "")


@pytest.mark.parametrize(
    ("tune", "spoil", "part"),
    [({**LORA, "vision": "frozen", "projector": "frozen"}, reentrant, "language"), (LORA, cut, "vision")],
)
def test_weights_without_a_gradient_are_named(tmp_path: Path, rank: Rank, tune: Any, spoil: Any, part: str) -> None:
    """Z08."""
    watch, step = first_step(tiny_plan(tmp_path, tune=tune), ("text", "image documents"), spoil)
    batches = step()
    with pytest.raises(TrainingError, match=rf"weights of {part} got no gradient in step 1, the first is model"):
        watch.after_step(rank, sees(batches), 0.5)


def test_ranks_that_begin_differently_are_named(rank: Rank) -> None:
    """G09."""
    weights = [("a", torch.randn(3, 5)), ("b", torch.tensor(2.0))]
    one = health.digests(weights, torch.float32)
    assert health.digests([(name, value.clone()) for name, value in weights], torch.float32) == one
    health.check_equal_start(rank, one, one)
    weights[0][1][1, 2] += 1e-6
    with pytest.raises(TrainingError, match="1 trained weights of rank 0 do not begin as rank 0 built them: a"):
        health.check_equal_start(rank, one, health.digests(weights, torch.float32))
