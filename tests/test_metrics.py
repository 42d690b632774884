"""Ranking metrics against brute force over all orders of tied documents, and the evaluation's summary."""

from __future__ import annotations

import json
import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.rundir import RunDir, read_json
from launcher.training.evaluate import summarise, warnings
from launcher.training.metriclog import MetricLog
from launcher.training.metrics import mrr_at_k, ndcg_at_k, recall_at_k
from launcher.training.rankstatus import RankStatus


def ordered_ndcg(labels, k):
    def gain(row):
        return sum(label / math.log2(rank + 1) for rank, label in enumerate(row[:k], start=1))

    return gain(labels) / gain(sorted(labels, reverse=True))


def ordered_mrr(labels, k):
    rank = next(rank for rank, label in enumerate(labels, start=1) if label > 0)
    return 1 / rank if rank <= k else 0.0


def ordered_recall(labels, k):
    return sum(label > 0 for label in labels[:k]) / sum(label > 0 for label in labels)


def expected(ordered, scores, labels, k):
    """Mean over the permutations that sort the scores: each order of tied documents once."""
    best = sorted(scores, reverse=True)
    orders = [p for p in permutations(range(len(scores))) if [scores[i] for i in p] == best]
    return sum(ordered([labels[i] for i in order], k) for order in orders) / len(orders)


lists = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n).filter(any),
        st.integers(1, 7),
    )
)


@settings(max_examples=150, deadline=None)
@given(lists)
def test_metrics_are_the_mean_over_orders_of_tied_documents(case):
    scores, labels, k = case
    assert ndcg_at_k(scores, labels, k) == pytest.approx(expected(ordered_ndcg, scores, labels, k))
    assert mrr_at_k(scores, labels, k) == pytest.approx(expected(ordered_mrr, scores, labels, k))
    assert recall_at_k(scores, labels, k) == pytest.approx(expected(ordered_recall, scores, labels, k))


def test_graded_labels_against_brute_force():
    scores, labels = [0.5, 0.5, 0.9, 0.5, 0.1], [3.0, 0.0, 1.0, 2.0, 0.5]
    assert ndcg_at_k(scores, labels, 3) == pytest.approx(expected(ordered_ndcg, scores, labels, 3))


def test_known_values():
    scores, labels = [0.1, 0.4, 0.3, 0.2], [1.0, 0.0, 1.0, 0.0]  # positives at ranks 2 and 4
    assert mrr_at_k(scores, labels, 10) == 0.5
    assert recall_at_k(scores, labels, 1) == 0.0
    assert recall_at_k(scores, labels, 2) == 0.5
    dcg = 1 / math.log2(3) + 1 / math.log2(5)
    assert ndcg_at_k(scores, labels, 10) == pytest.approx(dcg / (1 + 1 / math.log2(3)))


def test_sklearn_agrees_on_tied_ndcg():
    from sklearn.metrics import ndcg_score

    scores, labels = [0.3, 0.3, 0.3, 0.9, 0.1, 0.9], [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert ndcg_at_k(scores, labels, 10) == pytest.approx(ndcg_score([labels], [scores], k=10))


def test_one_positive_in_eight_with_equal_scores_is_chance():
    labels = [1.0] + [0.0] * 7
    assert recall_at_k([0.5] * 8, labels, 1) == pytest.approx(1 / 8)
    assert ndcg_at_k([0.5] * 8, labels, 10) == pytest.approx(0.494, abs=1e-3)


def test_a_score_that_is_not_a_number_ranks_last():
    assert mrr_at_k([math.nan, -5.0, 1.0], [1.0, 0.0, 0.0], 10) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("scores", "labels"), [([0.1], [0.0]), ([0.1, 0.2], [1.0]), ([], [])])
def test_lists_without_an_answer_are_refused(scores, labels):
    with pytest.raises(ValueError, match=r"positive label|scores for"):
        ndcg_at_k(scores, labels, 10)


GOOD = ([0.9, 0.1], [1.0, 0.0])
BAD = ([0.1, 0.9], [1.0, 0.0])
FLAT = ([0.5, 0.5], [1.0, 0.0])


def test_summary_is_the_mean_over_groups_whatever_their_order():
    records = {0: GOOD, 1: BAD, 2: GOOD, 3: FLAT}
    summary = summarise(records)
    assert summary["eval/recall@1"] == (1 + 0 + 1 + 0.5) / 4
    assert summary["eval/mrr@10"] == (1 + 0.5 + 1 + 0.75) / 4
    assert set(summary) == {"eval/ndcg@10", "eval/mrr@10", "eval/recall@1", "eval/recall@5"}
    assert summarise(dict(reversed(records.items()))) == summary


def test_groups_without_a_positive_are_left_out():
    assert summarise({0: GOOD, 1: ([0.9, 0.1], [0.0, 0.0])})["eval/recall@1"] == 1.0
    with pytest.raises(ValueError, match="no group"):
        summarise({1: ([0.9], [0.0])})


def test_equal_or_broken_scores_are_told():
    """R07: also of the model before training, which the same evaluation measures."""
    assert warnings({0: GOOD, 1: BAD}) == []
    assert warnings({0: GOOD, 1: BAD, 2: FLAT}) == []  # one tied group is no sign of a dead model
    assert "score alike in 2 of 3 groups" in warnings({0: FLAT, 1: GOOD, 2: FLAT})[0]
    assert "not finite (first: group 7)" in warnings({3: GOOD, 7: ([math.nan, 0.1], [1.0, 0.0])})[0]


def test_metric_lines_are_strict_json_and_only_of_rank_0(tmp_path):
    run = RunDir(tmp_path)
    numbers = {"epoch": 0.5, "lr": 1e-4, "queries_per_s": 3.0, "tokens_per_s": 9.0, "step_s": 0.1}
    numbers |= {"micro_steps": 1, "skipped": 0, "bad_steps": 0, "timings": {"forward_s": math.inf}}
    run.ranks.mkdir()
    for rank in (0, 1):
        log = MetricLog(run, rank, RankStatus(run.rank(rank), rank, "localhost"))
        log.step(step=1, total_steps=2, loss=math.nan, grad_norm=None, loss_scale=None, **numbers)
        log.evaluation(step=1, metrics=summarise({0: GOOD}), groups=1)
        log.event("checkpoint", step=1, path="x")
    step, evaluation = (json.loads(line) for line in run.metrics.read_text().splitlines())
    assert step["kind"] == "step"
    assert step["loss"] is None  # NaN is no JSON
    assert step["forward_s"] is None
    assert (evaluation["kind"], evaluation["eval/ndcg@10"], evaluation["groups"]) == ("eval", 1.0, 1)
    (event,) = (json.loads(line) for line in run.events.read_text().splitlines())
    assert (event["event"], event["step"], event["path"]) == ("checkpoint", 1, "x")


def test_a_phase_is_told_once_and_stands_in_the_state_file(tmp_path):
    run = RunDir(tmp_path)
    run.ranks.mkdir()
    log = MetricLog(run, 0, RankStatus(run.rank(0), 0, "localhost"))
    for name in ("loading model", "training", "training", "saving", "training"):
        log.phase(name)
    log.phase("ended", state="done", step=7)
    phases = [json.loads(line)["phase"] for line in run.events.read_text().splitlines()]
    assert phases == ["loading model", "training", "saving", "training", "ended"]
    state = read_json(run.rank(0))
    assert (state["phase"], state["state"], state["step"]) == ("ended", "done", 7)
