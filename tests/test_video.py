"""Films: which frames, how large, where they stand in a prompt; held to the processors and models of transformers."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest
import torch
from transformers.video_utils import VideoMetadata

from launcher.spec import VideoOptions
from launcher.training import processors
from launcher.training.batching import collate, make_units
from launcher.training.encoding import make_encoder, make_pieces
from launcher.training.engine import build_scorer
from launcher.training.images import MediaError
from launcher.training.media import MediaRule
from launcher.training.pieces import PieceEncoder
from launcher.training.pixels import Pixels
from launcher.training.prompts import SYSTEM, Text
from launcher.training.rows import Content, Image, Video
from launcher.training.video import Clip, check_video, choose_frames, read_frames, video_facts
from tests.films import film, number_of
from tests.groups import group, picture
from tests.tiny import INSTRUCTION, family_plan, tiny_plan

TWICE = VideoOptions(fps=2.0, min_frames=2)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four seconds of 10 frames each, as a film and as files of every second frame."""
    folder = tmp_path_factory.mktemp("films")
    film(folder / "film.mp4", width=64, height=48)
    for number in range(0, 40, 2):
        PIL.Image.new("RGB", (64, 48), (number * 6, 0, 0)).save(folder / f"{number:02}.png")
    return folder


def numbers(clip: Clip) -> list[int]:
    return [round(number_of(frame)) for frame in read_frames(clip)]


@pytest.mark.parametrize(
    ("options", "own", "wanted"),
    [
        ({}, {}, [0, 13, 26, 39]),  # 4 s at one a second
        ({"fps": 2}, {}, [0, 6, 11, 17, 22, 28, 33, 39]),
        ({"fps": 2}, {"fps": 0.5}, [0, 13, 26, 39]),  # the row's own rate, but min_frames
        ({"fps": 2, "max_frames": 5}, {}, [0, 13, 26, 39]),  # an even number
        ({"fps": 2, "max_frames": 5}, {"max_frames": 6}, [0, 8, 16, 23, 31, 39]),
        ({"fps": 30}, {"start_s": 1.0, "end_s": 1.5}, [10, 11, 13, 14]),  # no more than there are
        ({"fps": 2}, {"start_s": 0.3, "end_s": 0.35}, [3, 3]),  # one frame is seen twice
        ({"fps": 1, "min_frames": 3}, {"start_s": 3.0, "end_s": 99.0}, [30, 33, 36, 39]),
    ],
)
def test_which_frames(films: Path, options: dict, own: dict, wanted: list[int]) -> None:
    clip = choose_frames(Video(str(films / "film.mp4"), **own), VideoOptions(**options))
    assert list(clip.frames) == wanted
    # Its colours are coded with loss.
    assert numbers(clip) == pytest.approx(wanted, abs=1)


@pytest.mark.parametrize("suffix", [".mkv", ".avi", ".mov"])
def test_containers(tmp_path: Path, suffix: str) -> None:
    video = film(tmp_path / f"film{suffix}")
    assert video_facts(video, TWICE).duration_s == pytest.approx(4, abs=0.2)
    clip = choose_frames(video, TWICE)
    assert numbers(clip) == pytest.approx(clip.frames, abs=1)


def test_far_frames_are_sought(tmp_path: Path) -> None:
    clip = choose_frames(film(tmp_path / "film.mp4", frames=1200), VideoOptions(max_frames=4))
    assert clip.frames == (0, 400, 799, 1199)
    assert numbers(clip) == pytest.approx([0, 0, 39, 39], abs=1)


def test_films_stand_upright(tmp_path: Path) -> None:
    video = film(tmp_path / "phone.mp4", width=96, turn=90)
    facts = video_facts(video, TWICE)
    assert (facts.width, facts.height) == (64, 96)
    frame = next(read_frames(choose_frames(video, TWICE)))
    assert frame.shape == (96, 64, 3)
    blue = frame[..., 2] > 100
    assert blue[:, :28].all() and not blue[:, 36:].any()  # the stored upper half, turned to the left


def test_films_whose_frames_are_unevenly_shown(tmp_path: Path) -> None:
    """Recordings of a screen, animations, and what was cut out of a longer film with its times kept."""
    late = film(tmp_path / "late.mkv", times=[5 + n / 10 for n in range(40)])
    assert (video_facts(late, TWICE).frames, numbers(choose_frames(late, TWICE))[-1]) == (40, 39)
    colours = [PIL.Image.new("RGB", (32, 32), (red, 0, 0)) for red in (0, 120)]
    colours[0].save(tmp_path / "a.gif", save_all=True, append_images=colours[1:], duration=[200, 3000])
    check_video(Video(str(tmp_path / "a.gif")), TWICE, decode=True)  # its last frame is shown for 3 s
    slow = film(tmp_path / "slow.mp4", times=[n / 10 for n in range(10)] + [20.0, 54.9])
    between = choose_frames(replace(slow, start_s=26.0, end_s=27.0), TWICE)
    assert numbers(between) == [10, 10], "what is shown while no other begins"


def test_frame_files(films: Path) -> None:
    files = tuple(str(path) for path in sorted(films.glob("*.png")))
    clip = choose_frames(Video(None, files, fps=5.0), TWICE)
    assert len(clip.frames) == 20 and clip.times[:2] == pytest.approx([0.1, 0.5])
    assert numbers(clip) == list(range(0, 40, 2))
    assert numbers(choose_frames(Video(None, files, fps=5.0, max_frames=4), TWICE)) == [0, 12, 26, 38]
    check_video(Video(None, files), TWICE, decode=True)
    with pytest.raises(MediaError, match=r"gone\.png: No such file"):
        check_video(Video(None, (*files, "gone.png")), TWICE, decode=True)


def test_bad_files_are_named(films: Path, tmp_path: Path) -> None:
    whole = (films / "film.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "page.mp4").write_bytes(b"<html><body>404</body></html>")
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:4,\nhttp://127.0.0.1:9/film.ts\n")  # would be fetched
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream: Any = container.add_stream("aac", rate=16000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 16000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    film(tmp_path / "strip.mp4", width=804, height=4)
    reasons = {
        "cut.mp4": "is damaged|is cut short",
        "page.mp4": "not a video that FFmpeg can read",
        "empty.mp4": "not a video that FFmpeg can read",
        "list.m3u8": "not a video that FFmpeg can read",
        "sound.mp4": "no video stream",
        "strip.mp4": "one side is more than 200 times the other",
        "gone.mp4": "No such file",
    }
    for name, reason in reasons.items():
        with pytest.raises(MediaError, match=reason) as caught:
            check_video(Video(str(tmp_path / name)), TWICE, decode=True)
        assert str(caught.value).startswith(f"{tmp_path / name}: "), name
    check_video(Video(str(tmp_path / "cut.mp4")), TWICE, decode=False)  # its header is whole
    with pytest.raises(MediaError, match="from 9 s to 12 s: no frame begins there; it is 4 s long"):
        check_video(Video(str(films / "film.mp4"), start_s=9, end_s=12), TWICE, decode=False)


@pytest.mark.parametrize(
    ("options", "own", "area"),
    [
        ({}, {}, 512 * 512),
        ({"max_pixels": 128 * 128}, {}, 128 * 128),
        ({"total_pixels": 4 * 96 * 96}, {}, 96 * 96),  # four frames
        ({"max_pixels": 128 * 128}, {"max_pixels": 256 * 256}, 256 * 256),  # the row's own limit wins
        ({"total_pixels": 10}, {}, 64 * 64),  # never below min_pixels
        ({"total_pixels": 10}, {"min_pixels": 96 * 96}, 96 * 96),
    ],
)
def test_pixels_of_a_frame(tmp_path: Path, options: dict, own: dict, area: int) -> None:
    video = film(tmp_path / "large.mp4", frames=4, fps=1, width=512, height=512)
    rule = MediaRule(
        patch_size=16, merge_size=2, min_pixels=4096, max_pixels=512 * 512, video=VideoOptions(**options),
        timestamps=True,
    )  # fmt: skip
    clip, (times, rows, columns) = rule.clip(Video(video.path, **own))
    assert (times, rows * columns * 256) == (2, area)
    assert len(clip.frames) == 4


def as_text(content: Content, options: VideoOptions) -> tuple[str, list[Any], list[Clip]]:
    """Content as transformers takes it: placeholders in the text, images and clips beside it."""
    images = [PIL.Image.open(io.BytesIO(p.data)) for p in content if isinstance(p, Image) and p.data]
    clips = [choose_frames(p, options) for p in content if isinstance(p, Video)]
    pads = {Image: "image", Video: "video"}
    text = "".join(
        p if isinstance(p, str) else f"<|vision_start|><|{pads[type(p)]}_pad|><|vision_end|>" for p in content
    )
    return text, images, clips


def their_inputs(processor: Any, text: str, images: list[Any], clips: list[Clip]) -> Any:
    """What a processor of transformers makes of a text, its images, and the same frames as ours."""
    frames = [torch.from_numpy(np.stack(list(read_frames(clip)))).permute(0, 3, 1, 2) for clip in clips]
    metadata = [
        VideoMetadata(total_num_frames=40, fps=clip.fps, frames_indices=list(clip.frames), duration=4.0)
        for clip in clips
    ]
    limits = {"shortest_edge": 1024, "longest_edge": 10**7}
    videos = {"size": limits, "do_sample_frames": False, "video_metadata": metadata, "cap_pixels_per_frame": False}
    return processor(
        text=[text], images=images or None, videos=frames or None, return_tensors="pt",
        **({"videos_kwargs": videos} if clips else {}),
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_scores_equal_transformers_whole_forward(films: Path, tmp_path: Path, family: str) -> None:
    """Ids, pixels, positions, and images and videos of a micro-batch in one call of the tower (Z03)."""
    plan = family_plan(tmp_path, family, dataset={"video": {"fps": 1.0, "min_frames": 2}})
    processor = processors.load_processor(plan)
    scorer, encoder = build_scorer(plan, processor, torch.device("cpu")), make_encoder(plan, processor)
    short = Video(str(films / "film.mp4"), start_s=1.0, end_s=3.0)
    rows = [
        group(("which",), (short, "a film"), (picture(1), Video(short.path), "both"), ("none",)),
        group((short, picture(2), "like this"), (short,), ("a", picture(3))),
    ]
    encoded = [encoder.encode(row) for row in rows]
    if family != "qwen3_5":  # whose state runs along the sequence; for others the query is shared
        assert encoded[1].prefix > max(slot.start for slot in encoded[1].prompts[0].media[:2])
    pixels = Pixels(processor)
    needed = {s.key: pixels.rows(s) for e in encoded for p in e.prompts for s in p.media}
    batch = collate(encoded, make_units(encoded, plan.cost, 8192, splittable=False), needed, padded=True)
    assert batch.grid_thw is not None and sorted(batch.grid_thw[:, 0].tolist()) == [1, 1, 1, 1, 2]
    calls: list[Any] = []
    scorer.core.visual.register_forward_hook(lambda *_: calls.append(1))
    scores = scorer(batch).tolist()
    assert calls == [1]

    ids, expected = processors.token_ids(processor), []
    for core in (scorer.core.language_model.config, scorer.core.visual.config):
        core._attn_implementation_internal = "eager"
    for e, row in zip(encoded, rows, strict=True):
        for prompt, document in zip(e.prompts, row.documents, strict=True):
            (query, *more), (shown, *media) = (as_text(c, plan.config.dataset.video) for c in (row.query, document))
            text = (
                f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {INSTRUCTION}<Query>:{query}"
                f"\n<Document>:{shown}<|im_end|>\n<|im_start|>assistant\n"
            )
            inputs = their_inputs(processor, text, more[0] + media[0], more[1] + media[1])
            assert prompt.ids.tolist() == inputs["input_ids"][0].tolist()
            with torch.no_grad():
                logits = scorer.model(**inputs, use_cache=False).logits[0, -1]
            expected.append(float(logits[ids["yes"]] - logits[ids["no"]]))
    assert scores == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 4) for score in expected}) == 5  # the rows do differ


def test_patches_equal_the_video_processors_own(films: Path, tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path)
    processor = processors.load_processor(plan)
    clip = choose_frames(Video(str(films / "film.mp4")), TWICE)
    part = make_pieces(plan, processor).part(clip.video)
    text, images, _ = as_text((clip.video,), TWICE)
    theirs = their_inputs(processor, text, images, [choose_frames(clip.video, plan.config.dataset.video)])
    assert theirs["video_grid_thw"].tolist() == [list(part.slots[0].grid)]
    ours = Pixels(processor).rows(part.slots[0]).numbers()
    assert torch.equal(ours, theirs["pixel_values_videos"])
    assert ours.std() > 0.1


def test_qwen2_5_vl(films: Path, tmp_path: Path) -> None:
    """Its processor's ids and its model's positions, which count seconds."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLModel,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = processors.load_processor(tiny_plan(tmp_path)).tokenizer
    sizes = {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 10**6}}
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(**sizes), tokenizer, Qwen2VLVideoProcessor(**sizes))
    options = VideoOptions(fps=1.5, min_frames=2)
    rule = MediaRule(
        patch_size=14, merge_size=2, min_pixels=784, max_pixels=10**6, video=options, timestamps=False,
        tokens_per_second=2,
    )  # fmt: skip
    pieces = PieceEncoder(tokenizer, rule, max_length=4096)
    parts = ("look ", picture(1, 64, 48), " and ", Video(str(films / "film.mp4")), " then ", picture(2), " end")
    prompt = pieces.prompt(pieces.parts([Text(p) if isinstance(p, str) else p for p in parts]))
    assert [slot.grid for slot in prompt.media] == [(1, 4, 4), (3, 4, 4), (1, 4, 4)]  # factor 28, not 32 (I13)

    text, images, clips = as_text(parts, options)
    inputs = their_inputs(processor, text, images, clips)
    assert prompt.ids.tolist() == inputs["input_ids"][0].tolist()
    config = Qwen2_5_VLConfig(vision_config={"tokens_per_second": 2, "spatial_merge_size": 2})
    model: Any = SimpleNamespace(config=config)
    model.get_vision_position_ids = partial(Qwen2_5_VLModel.get_vision_position_ids, model)
    positions, _ = Qwen2_5_VLModel.get_rope_index(
        model,
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        inputs["image_grid_thw"],
        inputs["video_grid_thw"],
        torch.as_tensor(inputs["second_per_grid_ts"]),
    )
    assert np.array_equal(prompt.positions, positions[:, 0].numpy())
    video = prompt.media[1]
    times = prompt.positions[0, video.start : video.start + video.tokens]
    assert sorted({int(t) for t in times - times[0]}) == [0, 2, 5]  # 2 * 2 / 1.5 ids a patch
