"""Long films in segments: each is trained and scored as a document of its own, and their scores become one.

Pure but for reading how long a file is. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from launcher.spec import VideoOptions
from launcher.training.rows import Content, Group, Video
from launcher.training.video import video_facts

STATISTICS = ("max", "mean", "std", "log_count")  # of a document's segment scores, inputs of the logistic model
RIDGE = 1e-2  # keeps weights finite where the documents can be told apart without error


def with_segments(group: Group, segment_s: float, options: VideoOptions) -> Group:
    """The group with each document that holds a longer video in its place once a segment; `parts` says which
    document each one is of.

    The document's other content goes with every segment, and each has the document's label and teacher's score.
    Query videos stay whole. Raises VideoError.
    """
    documents, parts = [], []
    for number, document in enumerate(group.documents):
        segments = _segments(document, segment_s, options)
        documents += segments
        parts += [number] * len(segments)
    if len(documents) == len(group.documents):
        return group
    return replace(
        group,
        documents=tuple(documents),
        labels=tuple(group.labels[d] for d in parts),
        scores=None if group.scores is None else tuple(group.scores[d] for d in parts),
        parts=tuple(parts),
    )


def _segments(document: Content, segment_s: float, options: VideoOptions) -> list[Content]:
    """One document a segment of each of its videos, the other videos left out; itself when none is longer."""
    cuts = {i: cut(part, segment_s, options) for i, part in enumerate(document) if isinstance(part, Video)}
    if all(len(segments) == 1 for segments in cuts.values()):
        return [document]
    return [
        tuple(segment if j == i else part for j, part in enumerate(document) if j == i or j not in cuts)
        for i, segments in cuts.items()
        for segment in segments
    ]


def cut(video: Video, segment_s: float, options: VideoOptions) -> list[Video]:
    """Segments of equal length, at most `segment_s`, that cover the video (or the part of it that it names).

    Equal, because a short rest would be scored on next to nothing.

    Example: a film of 150 s in segments of at most 60 s is three of 50 s.
    """
    facts = video_facts(video, options)
    begin = video.start_s or 0.0
    end = facts.duration_s if video.end_s is None else min(video.end_s, facts.duration_s)
    count = max(1, math.ceil(round((end - begin) / segment_s, 6)))
    if count == 1:
        return [video]
    edges = [begin + (end - begin) * i / count for i in range(count + 1)]
    return [replace(video, start_s=edges[i], end_s=edges[i + 1]) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A fitted logistic model over STATISTICS; its inputs are standardised by `centre` and `spread`."""

    weights: tuple[float, ...]
    bias: float
    centre: tuple[float, ...]
    spread: tuple[float, ...]
    documents: int  # that it was fitted on

    def __call__(self, scores: Sequence[float]) -> float:
        """The log-odds that a document is relevant."""
        inputs = (np.array(statistics(scores)) - self.centre) / self.spread
        return float(inputs @ np.array(self.weights) + self.bias)


def fuse(scores: Sequence[float], options: VideoOptions, fitted: Fusion | None = None) -> float:
    """One score of a document from those of its segments, as dataset.video.fuse says; `fitted` is what logistic
    takes."""
    if options.fuse == "logistic":
        assert fitted is not None
        return fitted(scores)
    if options.fuse == "mean":
        return math.fsum(scores) / len(scores)
    best = sorted(scores, reverse=True)[: options.top_k if options.fuse == "top_k" else 1]
    return math.fsum(best) / len(best)


def statistics(scores: Sequence[float]) -> tuple[float, ...]:
    """STATISTICS of a document's segment scores."""
    values = np.asarray(scores, dtype=np.float64)
    return float(values.max()), float(values.mean()), float(values.std()), math.log(len(values))


def fit(documents: Sequence[tuple[Sequence[float], float]]) -> Fusion:
    """Newton's method with a small ridge on (segment scores, label) of documents; any label above 0 is relevant.

    Raises ValueError when all documents have one kind of label.
    """
    relevant = np.array([float(label > 0) for _, label in documents])
    if len(set(relevant.tolist())) < 2:
        raise ValueError("a logistic model needs documents with label 0 and others above 0")
    raw = np.array([statistics(scores) for scores, _ in documents])
    centre, spread = raw.mean(axis=0), raw.std(axis=0)
    spread[spread < 1e-9] = 1.0
    inputs = np.concatenate([(raw - centre) / spread, np.ones((len(raw), 1))], axis=1)
    ridge = RIDGE * np.array([1.0] * len(STATISTICS) + [0.0])
    weights = np.zeros(inputs.shape[1])
    for _ in range(50):
        odds = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        gradient = inputs.T @ (odds - relevant) / len(raw) + ridge * weights
        curvature = (inputs * (odds * (1 - odds))[:, None]).T @ inputs / len(raw) + np.diag(ridge + 1e-9)
        step = np.linalg.solve(curvature, gradient)
        weights -= step
        if np.abs(step).max() < 1e-10:
            break
    return Fusion(
        weights=tuple(weights[:-1].tolist()),
        bias=float(weights[-1]),
        centre=tuple(centre.tolist()),
        spread=tuple(spread.tolist()),
        documents=len(raw),
    )


Segments = Mapping[int, tuple[Sequence[float], float]]  # document -> (its segments' scores, its label)


def fuse_groups(
    groups: Mapping[int, Segments], options: VideoOptions
) -> tuple[dict[int, dict[int, float]], Fusion | None]:
    """One score a document of each group, and with fuse=logistic the model to keep.

    The logistic model is fitted on every other group and scores the rest, then the other way round, so that no
    document is measured by a model that saw its label. The model that is kept was fitted on all groups.
    Raises ValueError when a half has documents of one kind of label only.
    """
    if options.fuse != "logistic":
        return {g: {d: fuse(s, options) for d, (s, _) in docs.items()} for g, docs in groups.items()}, None
    halves = [list(groups)[0::2], list(groups)[1::2]]
    fitted = [fit([document for g in half for document in groups[g].values()]) for half in halves]
    fused = {
        g: {d: fuse(s, options, other) for d, (s, _) in groups[g].items()}
        for half, other in zip(halves, reversed(fitted), strict=True)
        for g in half
    }
    everything = fit([document for docs in groups.values() for document in docs.values()])
    return {g: fused[g] for g in groups}, everything
