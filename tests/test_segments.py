"""Long films in segments: how they are cut, trained beside their document's label, and fused to one score."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from launcher.errors import ConfigError
from launcher.plain import from_data, to_data
from launcher.planning.config import read_config
from launcher.spec import VideoOptions
from launcher.training import processors
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.evaluate import Scored, fused, score_rows
from launcher.training.pixels import Pixels
from launcher.training.rows import Video
from launcher.training.segments import RIDGE, Fusion, cut, fit, fuse, fuse_groups, statistics, with_segments
from launcher.training.steps import StepMaker
from tests.films import film
from tests.groups import group, picture
from tests.tiny import tiny_plan

OPTIONS = VideoOptions(fps=1.0, min_frames=2)


def test_segments_cover_the_film(tmp_path: Path) -> None:
    video = film(tmp_path / "film.mp4")  # 4 s
    assert cut(video, 4, OPTIONS) == cut(video, 60, OPTIONS) == [video]
    spans = [(part.start_s, part.end_s) for part in cut(video, 1.5, OPTIONS)]
    assert np.allclose(spans, [(0, 4 / 3), (4 / 3, 8 / 3), (8 / 3, 4)])  # equal ones, none with a short rest
    middle = Video(video.path, start_s=1.0, end_s=3.0)
    assert [(part.start_s, part.end_s) for part in cut(middle, 1, OPTIONS)] == [(1, 2), (2, 3)]
    PIL.Image.new("RGB", (64, 64)).save(tmp_path / "frame.png")
    frames = Video(None, (str(tmp_path / "frame.png"),) * 30, fps=10)
    assert [(part.start_s, part.end_s) for part in cut(frames, 2, OPTIONS)] == [(0, 1.5), (1.5, 3)]


def test_each_segment_is_a_document_with_its_label(tmp_path: Path) -> None:
    video = film(tmp_path / "film.mp4")
    short = Video(video.path, start_s=0.0, end_s=1.0)
    row = group((video, "like this"), (video, picture(1), "a"), ("text",), (short, "b"), (short, video))
    found = with_segments(row, 2.0, OPTIONS)
    assert found.query == row.query
    assert found.parts == (0, 0, 1, 2, 3, 3, 3)
    assert found.labels == (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert found.documents[0] == (Video(video.path, start_s=0.0, end_s=2.0), picture(1), "a")
    assert found.documents[2] == ("text",) and found.documents[4] == (short,)
    assert with_segments(row, 10.0, OPTIONS) == row


@pytest.mark.parametrize(("how", "score"), [("max", 3.0), ("mean", 1.0), ("top_k", 2.0)])
def test_fuse(how: str, score: float) -> None:
    options = VideoOptions(fuse=how, top_k=2)
    assert fuse([1.0, -1.0, 3.0], options) == score
    assert fuse([0.5], options) == 0.5


def some_groups(count: int, seed: int = 0) -> dict[int, dict[int, tuple[list[float], float]]]:
    """A relevant video is high throughout, and others have one segment that is higher still."""
    random, groups = np.random.default_rng(seed), {}
    for g in range(count):
        groups[g] = {
            0: (random.normal(1, 0.3, 6).tolist(), 1.0),
            1: ([*random.normal(-1, 0.3, 7).tolist(), 4.0], 0.0),
            2: (random.normal(-1, 0.3, 4).tolist(), 0.0),
        }
    return groups


def test_the_fitted_model_minimises_its_loss() -> None:
    from scipy.optimize import minimize

    documents = [document for docs in some_groups(20).values() for document in docs.values()]
    model = fit(documents)
    inputs = (np.array([statistics(scores) for scores, _ in documents]) - model.centre) / model.spread
    labels = np.array([label for _, label in documents])

    def loss(weights: Any) -> float:
        odds = inputs @ weights[:-1] + weights[-1]
        return float(np.mean(np.logaddexp(0, odds) - labels * odds) + RIDGE / 2 * (weights[:-1] ** 2).sum())

    best = minimize(loss, np.zeros(5))
    assert [*model.weights, model.bias] == pytest.approx(best.x, abs=1e-3)
    assert from_data(Fusion, to_data(model)) == model


def test_no_document_is_measured_by_a_model_that_saw_it() -> None:
    groups, options = some_groups(10), VideoOptions(fuse="logistic")
    found, kept = fuse_groups(groups, options)
    assert kept is not None and kept.documents == 30
    # The largest segment misleads; the fitted model finds what doesn't.
    assert all(max(scores, key=scores.__getitem__) == 0 for scores in found.values())
    assert all(max(docs, key=lambda d: max(docs[d][0])) == 1 for docs in groups.values())
    swapped = {**groups, 3: {d: (scores, 1.0 - label) for d, (scores, label) in groups[3].items()}}
    again, _ = fuse_groups(swapped, options)
    assert again[3] == found[3] and again[5] == found[5] and again[4] != found[4]


def test_a_model_that_cannot_be_fitted_is_said() -> None:
    config: Any = SimpleNamespace(dataset=SimpleNamespace(video=VideoOptions(fuse="logistic")))
    records = {0: Scored([1.0, 2.0, 0.0], [1.0, 1.0, 1.0], [], [0, 0, 1])}
    found = fused(records, config)
    assert found.model is None and "needs documents with label 0" in str(found.note)
    assert list(found.records[0].scores) == [2.0, 0.0]
    whole = {0: Scored([1.0, 2.0], [1.0, 0.0], [], [0, 1])}
    assert fused(whole, config).records is whole


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("dataset.video.fuse=mean",), "has no effect with dataset.video.segment_s=null"),
        (("dataset.video.segment_s=60", "dataset.video.top_k=2"), "has no effect with dataset.video.fuse=max"),
        (("task=sft", "loss=cross_entropy", "dataset.video.segment_s=60"), "has no effect with task=sft"),
    ],
)
def test_keys_without_effect_are_refused(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_config(["model=tiny", "dataset=jsonl", "dataset.train=rows.jsonl", *words])


def test_scores_of_segments_find_their_document(tmp_path: Path) -> None:
    """Whole rows through encoder, steps and evaluation: documents in order, one score each, the rank of no matter."""
    video = film(tmp_path / "film.mp4")
    plan = tiny_plan(tmp_path, dataset={"video": {"segment_s": 2.0, "fps": 1.0, "min_frames": 2, "fuse": "mean"}})
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    encoder, pixels = make_encoder(plan, processor), Pixels(processor)
    rank: Any = SimpleNamespace(device=torch.device("cpu"), gather=lambda value: [value])
    maker = StepMaker(plan, encoder, pixels, rank=0, padded=True, warn=print)
    row = group(("what",), (video, "a"), ("text",), (video, "b"))
    found = score_rows(scorer, maker, [row], rank)
    assert found is not None and found.records[0].documents == [0, 0, 1, 2, 2]
    segments = found.records[0].scores
    assert len(set(segments)) == 5
    scores = fused(found.records, plan.config).records[0]
    assert scores.scores == pytest.approx([math.fsum(segments[:2]) / 2, segments[2], math.fsum(segments[3:]) / 2])
    assert scores.labels == [1.0, 0.0, 0.0]
