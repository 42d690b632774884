"""The comparison with ms-swift: the same rows in the same order, and what its log is read as."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.training.schedule import Order
from tests.bench.peer import arguments, read_log, read_setting, sums, write_rows
from tests.bench.peer_runs import Job, Outcome
from tests.bench.peer_table import least, parity


def test_settings_are_read_as_they_are_written() -> None:
    assert [str(read_setting(text)) for text in ("keep", "m4+liger", "bf16+again+plain")] == [
        *("keep+plain+m1", "again+liger+m4", "again+plain+bf16+m1")
    ]
    with pytest.raises(ValueError, match=r"fast.*again, keep"):
        read_setting("fast+m1")


def test_rows_keep_order_documents_and_pictures(tmp_path: Path) -> None:
    rows = [{"query": f"q{n}", "positives": [{"image": f"{n}.png"}], "negatives": ["a", "b"]} for n in range(6)]
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    ours.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_rows(ours, theirs, groups=2, steps=2, seed=7)
    found = [json.loads(line) for line in theirs.read_text().splitlines()]
    drawn = [n for step in range(2) for n in Order(6, 2, 7).batch(step)]
    assert [row["messages"][0]["content"] for row in found] == [f"q{n}" for n in drawn]
    assert drawn != sorted(drawn)
    assert found[0]["positive_images"] == [[str(tmp_path / f"{drawn[0]}.png")]]
    assert found[0]["positive_messages"][0][0]["content"] == "<image>"
    assert [turn[0]["content"] for turn in found[0]["negative_messages"]] == ["a", "b"]


def test_a_step_is_as_many_rows_in_every_setting(tmp_path: Path) -> None:
    files = {"model": tmp_path, "rows": tmp_path, "out": tmp_path, "steps": 1, "lr": 1e-5, "task": "rerank"}
    for text, accumulated in (("m1", "4"), ("m2", "2"), ("m4", "1")):
        words = arguments(read_setting(text), groups=4, gpus=1, **files)  # type: ignore[arg-type]
        assert words[words.index("--gradient_accumulation_steps") + 1] == accumulated
        assert sums(read_setting(text), task="rerank", groups=4, gpus=1) == int(accumulated)
    with pytest.raises(ValueError, match="do not divide"):
        arguments(read_setting("m4"), groups=6, gpus=1, **files)  # type: ignore[arg-type]


def test_seconds_of_a_step_follow_from_the_means_of_its_log(tmp_path: Path) -> None:
    means = (5.0, 3.0, 7 / 3)  # steps of 5, 1 and 1 seconds
    lines = [{"loss": 4.0, "grad_norm": 8.0, "train_speed(s/it)": mean, "memory(GiB)": 9.5} for mean in means]
    file = tmp_path / "logging.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"train_runtime": 7.0}]))
    log = read_log(file, 2)
    assert log.step_s == pytest.approx([5, 1, 1])
    assert (log.losses[0], log.grad_norms[0], log.reserved_gib) == (2.0, 4.0, 9.5)


def test_losses_that_differ_are_told() -> None:
    peer = Outcome(
        workload="text", side="ms-swift", setting="keep", groups=4, losses=(2.0, 1.8, 1.9), step_s=(9.0, 2.0, 2.0)
    )
    same, differs = (
        Outcome(workload="text", side="launcher", setting="", groups=4, losses=losses)
        for losses in ((2.01, 1.8, 1.9), (2.2, 1.8, 1.9))
    )
    assert peer.seconds == 0.5
    assert parity([peer, same])[0]
    agrees, text = parity([peer, same, differs])
    assert not agrees and text.count("DIFFERENT") == 1


def test_larger_micro_batches_of_what_did_not_fit_are_known() -> None:
    small, large, other = (
        Job(workload="text", documents=8, setting=read_setting(text)) for text in ("keep+m1", "keep+m2", "m2")
    )
    assert large.needs_more_than(small)
    assert not small.needs_more_than(large) and not other.needs_more_than(small)


def test_without_a_shared_prefix_tokens_are_those_of_whole_prompts() -> None:
    for name, (alone, shared) in {"text": (3795, 2668), "page": (4385, 4141), "imgq": (9409, 1912)}.items():
        assert (least(name, shared=False)[0], least(name, shared=True)[0]) == pytest.approx((alone, shared), rel=0.02)
        assert least(name, shared=False)[1] > least(name, shared=True)[1]
