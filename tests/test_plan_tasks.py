"""What a task makes of a plan: its metric, its head's parameters, and what does not fit it."""

from __future__ import annotations

import math

import pytest

from launcher.errors import ConfigError
from launcher.planning.models import parameter_counts, trainable_counts
from launcher.planning.shapes import read_shape
from launcher.running.journal import best_of
from launcher.spec import TaskConfig, TuneConfig, is_better, metric_of
from tests.planning_support import compose, plan

SFT = ("model=tiny", "dataset=jsonl", "dataset.train=chats.jsonl", "task=sft")
CLASSIFY = (*SFT[:3], "task=classify")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((*SFT, "eval.metric=ndcg@10"), "eval.metric=ndcg@10 is not measured with task=sft, whose metrics are loss"),
        (("model=tiny", "task=rerank", "eval.metric=accuracy"), "is not measured with task=rerank"),
        ((*SFT, "tune=lora", "tune.head=full"), "the head of this model is its embeddings"),
        ((*CLASSIFY, "tune.head=full"), "tune.head=full has no effect with task=classify"),
        ((*CLASSIFY, "tune=lora", "checkpoint.merge=false"), "the head of the classes is no part of the base model"),
        ((*SFT, "task.instruction=x"), "task.instruction=x has no effect with task=sft"),
    ],
)
def test_what_does_not_fit_the_task(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(*words)
    assert text in " ".join(str(refused.value).split())


def test_parameters_of_heads() -> None:
    config = compose(*SFT)
    shape = read_shape(config.model, {**config.model.arch, "tie_word_embeddings": False})
    tune = TuneConfig(name="lora", head="full")
    heads = [trainable_counts(shape, tune, TaskConfig(name=name))["head"] for name in ("rerank", "sft", "classify")]
    assert heads == [2 * shape.hidden, parameter_counts(shape)["head"], 0] and heads[1] > 0
    classes = TaskConfig(name="classify", classes=["a", "b", "c"])
    assert trainable_counts(shape, TuneConfig(name="lora"), classes)["head"] == 3 * shape.hidden


def test_metrics_by_task_and_which_way_is_better() -> None:
    assert [compose(*words).metric for words in (("model=tiny",), SFT, CLASSIFY)] == ["ndcg@10", "loss", "accuracy"]
    assert metric_of({"task": {"name": "sft"}, "eval": {"metric": "auto"}}) == metric_of({"eval": {"metric": "loss"}})
    assert metric_of({}) == "ndcg@10" and metric_of({"eval": None}) == "ndcg@10"
    assert is_better("loss", 1.0, 2.0) and is_better("eval/loss", 1.0, 2.0) and not is_better("accuracy", 1.0, 2.0)
    assert is_better("loss", 3.0, math.nan) and not is_better("loss", math.nan, None)
    lines = [{"step": step, "eval/loss": loss, "eval/ndcg@10": 0.5} for step, loss in enumerate((2.0, 1.0, 1.5))]
    assert best_of(lines, "loss") == lines[1] and best_of(lines, "ndcg@10") == lines[0]
    assert best_of([{"step": 1, "eval/loss": None}], "loss") is None
