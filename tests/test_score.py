"""`evaluate`, `score`, `export`: what they find, what they give, what they refuse."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from launcher.__main__ import main
from launcher.errors import ConfigError
from launcher.rundir import CHECKPOINT_FORMAT, COMPLETE, RunDir, file_entry, read_json
from launcher.running import push, trained
from launcher.spec import RunPlan, plan_to_json
from launcher.training import processors, verbs
from launcher.training.engine import build_scorer
from tests.groups import picture
from tests.test_export import LORA, packed_scores
from tests.test_export import trained as moved
from tests.tiny import tiny_plan

ROWS = [
    {"id": "a", "query": "why", "documents": ["because", "a ring", "because", ""]},
    '{"query": "half a row"',
    {"query": "what", "documents": ["a ring", {"image": "gone.png"}]},
    {"query": "what", "documents": ["a ring", {"image": "torn.png"}, {"image": "good.png", "text": "it"}]},
    {"query": "who", "negatives": ["a ring"], "positives": [{"image": "good.png"}]},
    {"query": {"image": "torn.png"}, "documents": ["because"]},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run folder with one whole checkpoint of a tiny model, and a file of rows beside it."""
    root = tmp_path_factory.mktemp("score")
    run = RunDir(root / "run")
    plan = tiny_plan(run.path, tune=LORA)
    checkpoint = run.checkpoint(7)
    moved(plan, checkpoint)
    state = read_json(checkpoint / "state.json")
    files = {file.name: file_entry(file) for file in checkpoint.glob("*.safetensors")}
    text = json.dumps({**state, "serial": 1, "format": CHECKPOINT_FORMAT, "files": files})
    (checkpoint / "state.json").write_text(text)
    (checkpoint / COMPLETE).write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    run.plan.write_text(plan_to_json(plan))
    good = picture(3).data
    assert good is not None
    (root / "good.png").write_bytes(good)
    (root / "torn.png").write_bytes(good[:-2000])
    (root / "rows.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in ROWS))
    labelled = [{"query": f"q{i}", "positives": ["because"], "negatives": ["a ring", "it"]} for i in range(5)]
    (root / "eval.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    return run


def use(verb: str, target: str, *words: str, **options: Any) -> int:
    """What the verb's process does, in this one."""
    found = trained.find_target(target, "runs")
    plan = trained.usable_plan(found, words, "cpu")
    if verb == "score":
        plan = replace(plan, config=replace(plan.config, dataset=replace(plan.config.dataset, on_bad="skip")))
    return verbs.run(plan, argparse.Namespace(verb=verb, weights=found.weights, tolerance=None, **options))


def scored(run: RunDir, target: str, out: Path) -> list[dict[str, Any]]:
    assert use("score", target, rows=str(run.path.parent / "rows.jsonl"), out=out) == 0
    assert [file.name for file in out.parent.iterdir() if file.name.startswith(".")] == []
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_each_row_has_its_line_and_what_cannot_be_read_has_no_score(run: RunDir, tmp_path: Path) -> None:
    """I20."""
    lines = scored(run, str(run.path), tmp_path / "out.jsonl")
    assert [line["id"] for line in lines] == ["a", "2", "3", "4", "5", "6"]
    assert [[type(score).__name__ for score in line["scores"]] for line in lines] == [
        ["float"] * 4,
        [],
        [],
        ["float", "NoneType", "float"],
        ["float"] * 2,
        ["NoneType"],
    ]
    reasons = [line.get("error", "") for line in lines]
    assert "not JSON" in reasons[1]
    assert "gone.png" in reasons[2]
    assert reasons[3].startswith("document 1: ")
    assert "torn.png" in reasons[3]
    assert "torn.png" in reasons[5]
    assert [bool(reason) for reason in reasons] == [False, True, True, True, False, True]
    first = lines[0]["scores"]
    assert first[0] == pytest.approx(first[2], abs=1e-6)
    assert len({round(score, 6) for score in first}) == 3
    assert "labels" not in lines[0]
    assert lines[4]["labels"] == [1.0, 0.0]

    plan = tiny_plan(run.path, tune=LORA)
    scorer = build_scorer(plan, processors.load_processor(plan), torch.device("cpu"))
    masters = moved(plan, tmp_path / "again")
    scorer.load_state_dict(masters.state_dict())
    config = replace(plan.config, dataset=replace(plan.config.dataset, on_bad="skip"))
    from launcher.training.score import rows_to_score

    drawn = replace(config, dataset=replace(config.dataset, format="digits"))  # as the demo's: its file has rows
    groups = list(rows_to_score(drawn, str(run.path.parent / "rows.jsonl")))
    expected = packed_scores(plan, scorer, [groups[0]])  # type: ignore[list-item]
    assert lines[0]["logits"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_an_export_scores_and_measures_as_its_checkpoint(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert use("export", str(run.path), out=tmp_path / "export") == 0
    before, after = (
        scored(run, str(target), tmp_path / f"{name}.jsonl")
        for name, target in (("checkpoint", run.checkpoint(7)), ("export", tmp_path / "export"))
    )
    for one, other in zip(before, after, strict=True):
        assert one["id"] == other["id"]
        assert one["logits"] == pytest.approx(other["logits"], abs=1e-5)
    held_out = f"dataset.eval={run.path.parent / 'eval.jsonl'}"
    results = []
    for target in (run.path, tmp_path / "export"):
        assert use("evaluate", str(target), held_out, out=tmp_path / "evaluation.json") == 0
        results.append(read_json(tmp_path / "evaluation.json"))
    assert results[0]["rows"] == 5
    assert results[0]["metrics"].keys() >= {"eval/ndcg@10", "eval/recall@1"}
    assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], abs=1e-5)
    assert "ndcg@10" in capsys.readouterr().out

    assert use("golden", str(tmp_path / "export")) == 0
    golden = read_json(tmp_path / "export/golden.json")
    golden["pairs"][3]["score"] += 0.01
    (tmp_path / "export/golden.json").write_text(json.dumps(golden))
    assert use("golden", str(tmp_path / "export")) == 4

    plan = trained.usable_plan(trained.find_target(str(tmp_path / "export"), "runs"), [], "cpu")
    weights = tmp_path / "export/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut short[^$]*try  python -m launcher export RUN"):
        trained.find_target(str(tmp_path / "export"), "runs")
    options = argparse.Namespace(verb="golden", weights=tmp_path / "export", tolerance=None)
    with pytest.raises(ConfigError, match=r"would not load[^$]*try  python -m launcher export RUN"):
        verbs.run(plan, options)  # cut short between the look and the load


def test_the_verbs_start_a_process_of_their_own(run: RunDir, launch: Any, tmp_path: Path) -> None:
    rows = run.path.parent / "rows.jsonl"
    done = launch("score", str(rows), "--model", str(run.path), "--device", "cpu", cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert "6 rows, 4 with an error" in done.stdout
    assert "Warning" not in done.stderr and "accelerator" not in done.stdout + done.stderr  # of what nobody can change
    assert len((tmp_path / "rows.scores.jsonl").read_text().splitlines()) == 6
    part = (f"dataset.train={run.path.parent / 'eval.jsonl'}", "dataset.eval_fraction=0.5")  # as a run may have it
    words = ("evaluate", str(run.path), *part, "--device", "cpu", "-o", "held.json")
    done = launch(*words, cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert 0 < read_json(tmp_path / "held.json")["rows"] < 5 and "eval.jsonl" in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("evaluate", "no run in"),
        ("evaluate nowhere", "no run folder nowhere"),
        ("evaluate RUN", "dataset.eval is not given"),
        ("evaluate RUN optim.lr=1 dataset.evl=x dataset.max_length=many", "3 problems"),
        ("evaluate RUN --golden", "has no export"),
        ("evaluate RUN --golden x dataset.eval=F", "--golden takes no rows"),
        ("evaluate RUN dataset=jsonl", "dataset=jsonl chooses a group of settings"),
        ("evaluate RUN RUN", "one run, checkpoint or export, not 2"),
        ("score", "score which file?"),
        ("score rows.jsonl --model RUN --out taken", "taken is there already"),
        ("score none.jsonl --model RUN", "  none.jsonl does not exist"),
        ("export RUN/checkpoints/step-000008", "step-000008 does not exist"),
        ("export RUN --out taken", "taken is a file; an export is a folder"),
        ("export RUN --push nameless", "a repository is NAME/REPO"),
        ("export RUN --push a/b", "HF_HUB_OFFLINE is set"),
        ("evaluate RUN --device cuda dataset.eval=F", "random weights made on a CPU"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_type(
    run: RunDir,
    words: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    assert main(words.replace("RUN", str(run.path)).split()) == 2
    said = capsys.readouterr().err
    assert text in said
    assert "     try  " in said


def test_the_last_run_that_has_a_checkpoint_is_meant(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later one that has none yet, or never had, hides no earlier one; nothing is taken without a word."""
    root = str(run.path.parent)
    assert trained.find_target("latest", root).weights == run.checkpoint(7)
    assert capsys.readouterr().err == ""
    later = RunDir(run.path.with_name("later"))
    later.path.mkdir()
    later.plan.write_text(run.plan.read_text())
    os.utime(run.plan, (1.0, 1.0))
    for newest in (True, False):
        assert trained.find_target("latest", root, newest=newest).weights == run.checkpoint(7)
        assert capsys.readouterr().err == f"latest: {run.path}, as {later.path} has no checkpoint\n"
    with pytest.raises(ConfigError, match="later/checkpoints holds no complete checkpoint"):
        trained.find_target("later", root)
    shutil.rmtree(later.path)


@pytest.mark.parametrize("verb", ["evaluate", "score", "export"])
def test_each_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m launcher {verb}" in capsys.readouterr().out


def test_a_checkpoint_of_another_model_is_refused(run: RunDir, tmp_path: Path) -> None:
    target = trained.find_target(str(run.path), "runs")
    full = replace(target.plan.config.tune, **dict.fromkeys(("language", "vision", "projector"), "full"))
    plan: RunPlan = replace(target.plan, config=replace(target.plan.config, tune=full))
    plan = trained.usable_plan(replace(target, plan=plan), [], "cpu")
    from launcher.training import finished

    with pytest.raises(ConfigError, match="of another model"):
        finished.load(plan, target.weights)
    (tmp_path / "step-000001").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "step-000001/part.safetensors")
    with pytest.raises(ConfigError, match="COMPLETE is missing"):
        finished.load(trained.usable_plan(target, [], "cpu"), tmp_path / "step-000001")


def test_a_push_without_a_token_stops_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    with pytest.raises(ConfigError, match="no token"):
        push.check_push("a/b", public=False)


@pytest.mark.parametrize("verb", ["score", "export"])
def test_a_checkpoint_that_was_cut_short_is_named_before_anything_is_loaded(
    run: RunDir, tmp_path: Path, verb: str
) -> None:
    checkpoint = RunDir(tmp_path / "run").checkpoint(7)
    shutil.copytree(run.checkpoint(7), checkpoint)
    shutil.copy(run.plan, tmp_path / "run")
    part = next(checkpoint.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-8])
    options = {"rows": str(run.path.parent / "rows.jsonl")} if verb == "score" else {}
    with pytest.raises(ConfigError, match=rf"{part.name} has \d+ bytes"):
        use(verb, str(checkpoint), out=tmp_path / "out", **options)
