"""A class read off the last token of a chat by a head of its own."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from launcher.rundir import RunDir
from launcher.training import evaluate, processors
from launcher.training.batching import Unit, collate, make_units, split_step
from launcher.training.chats import with_classes
from launcher.training.encoding import make_encoder
from launcher.training.engine import build_scorer
from launcher.training.export import export_from_checkpoint
from launcher.training.heads import make_head
from launcher.training.losses import loss_of
from launcher.training.pixels import Pixels
from launcher.training.show import show_rows
from launcher.training.tuning import trainable_by_part
from tests.groups import packed, picture
from tests.test_chats import chat
from tests.test_export import trained
from tests.tiny import family_plan, tiny_plan

ROWS = [
    chat(("user", ("the door is red",)), label="red"),
    chat(("user", (picture(1), "which colour?")), label="blue"),
    chat(("system", ("be exact",)), ("user", ("the ring " * 20, picture(2, 32, 96))), label="red"),
    chat(("user", ("a",)), ("assistant", ("b",)), ("user", ("c",)), label="a colour"),
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tune = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen"}
    plan = tiny_plan(
        tmp_path_factory.mktemp("run"), task={"name": "classify"}, loss={"name": "cross_entropy"}, tune=tune
    )
    plan = with_classes(plan, ROWS)
    processor = processors.load_processor(plan)
    scorer = build_scorer(plan, processor, torch.device("cpu"))
    return {"plan": plan, "processor": processor, "scorer": scorer, "encoder": make_encoder(plan, processor)}


def test_logits_are_the_head_times_the_last_hidden_state(parts: dict[str, Any]) -> None:
    plan, scorer = parts["plan"], parts["scorer"]
    encoded = [parts["encoder"].encode(row) for row in ROWS]
    batch = packed(parts["processor"], encoded, make_units(encoded, plan.cost, 8192, splittable=True))
    logits = scorer(batch)
    assert logits.shape == (4, 3) and logits.dtype == torch.float32
    core, wanted = scorer.core, []
    configs = [core.language_model.config, core.visual.config]
    ours = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation_internal = "eager"
    pixels = Pixels(parts["processor"])
    for (prompt,) in (one.prompts for one in encoded):
        ids = torch.from_numpy(prompt.ids)[None]
        inputs: dict[str, Any] = {"mm_token_type_ids": (ids == processors.token_ids(parts["processor"])["image"]).int()}
        if prompt.media:
            inputs["pixel_values"] = torch.cat([pixels.rows(slot).numbers() for slot in prompt.media])
            inputs["image_grid_thw"] = torch.tensor([slot.grid for slot in prompt.media])
        hidden = core(input_ids=ids, use_cache=False, **inputs).last_hidden_state[0, -1]
        wanted.append(scorer.head.weight @ hidden)
    for config, name in zip(configs, ours, strict=True):
        config._attn_implementation_internal = name
    torch.testing.assert_close(logits, torch.stack(wanted), atol=1e-5, rtol=1e-4)


def test_any_division_has_the_same_loss_and_gradient(parts: dict[str, Any]) -> None:
    plan, scorer = parts["plan"], parts["scorer"]
    encoded = [parts["encoder"].encode(row) for row in ROWS]
    loss, found = loss_of(plan.config), []
    for ranks, max_tokens in ((1, 8192), (3, 160)):
        steps = split_step(make_units(encoded, plan.cost, max_tokens, splittable=True), [1.0] * ranks, max_tokens)
        batches = [packed(parts["processor"], encoded, step) for rank in steps for step in rank]
        logits = [scorer(batch) for batch in batches]
        value = sum(loss(z, batch, plan.config.loss) for z, batch in zip(logits, batches, strict=True))
        value.backward()
        found.append((value.detach(), scorer.head.weight.grad.clone()))
        scorer.zero_grad(set_to_none=True)
    labels = torch.tensor([2, 1, 2, 0])
    assert [parts["plan"].config.task.classes[i] for i in labels] == [row.label for row in ROWS]
    torch.testing.assert_close(found[0][0], F.cross_entropy(logits_of(parts, encoded), labels, reduction="sum"))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)
    assert found[0][1].abs().sum() > 0


def logits_of(parts: dict[str, Any], encoded: list[Any]) -> torch.Tensor:
    """One row at a time, in their order."""
    single = [packed(parts["processor"], [one], [Unit(0, (0,), one.tokens, 1.0)]) for one in encoded]
    return torch.cat([parts["scorer"](batch) for batch in single]).detach()


def test_the_head_always_trains(parts: dict[str, Any]) -> None:
    from launcher.families import FAMILIES

    counts = trainable_by_part(parts["scorer"], FAMILIES["qwen3_vl"])
    assert counts["head"] == parts["plan"].trainable["head"] == 3 * 128 and counts["language"] > 0


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3"])
def test_the_card_of_an_export_tells_how_to_ask_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"name": "classify", "classes": ["bike", "car"], "system": 'be "exact"'}
    tune = {"name": "lora", "language": "lora", "vision": "frozen", "projector": "frozen"}
    plan = family_plan(tmp_path / "run", family, task=task, loss={"name": "cross_entropy"}, tune=tune)
    scorer = trained(plan, tmp_path / "step-000007")
    state = json.loads((tmp_path / "step-000007/state.json").read_text())
    (tmp_path / "step-000007/state.json").write_text(json.dumps({**state, "classes": task["classes"]}))
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.metrics.write_text('{"kind": "eval", "step": 7, "eval/accuracy": 0.5, "eval/loss": null}\n')
    folder = export_from_checkpoint(plan, tmp_path / "step-000007", tmp_path / "export")
    card = (folder / "README.md").read_text()
    assert "head full, a row of weights a class" in card
    assert "| accuracy | 0.5000 |" in card and "| loss |" not in card  # that was not finite
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(folder)
    exec(compile(code, "README.md", "exec"), {})
    encoded = make_encoder(plan, processors.load_processor(plan)).encode(
        chat(("user", ("a red bicycle",)), label="car")
    )
    with torch.no_grad():
        wanted = scorer(collate([encoded], [Unit(0, (0,), encoded.tokens, 1.0)], {}, padded=True)).softmax(dim=1)[0]
    name, _, numbers = capsys.readouterr().out.strip().splitlines()[-1].partition(" ")
    assert name == task["classes"][int(wanted.argmax())]
    assert json.loads(numbers) == pytest.approx(wanted.tolist(), abs=1e-5)


def test_rows_are_shown_with_their_class(parts: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    plan = parts["plan"]
    show_rows(plan, ROWS[:2], 1)
    task = dataclasses.replace(plan.config.task, classes=[])
    unread = dataclasses.replace(plan, config=dataclasses.replace(plan.config, task=task))
    show_rows(unread, ROWS, 1)  # as `check data` does, before all rows have told the classes
    shown = capsys.readouterr().out
    assert re.findall(r"^- prompt 1 of 1: .* tokens, (.*)", shown, re.MULTILINE) == [
        "class red (row 2 of the head)",
        "class red",
    ]
    assert shown.count("the door is red<|im_end|>") == 2 and " shared" not in shown


def test_accuracy_and_loss() -> None:
    config = tiny_plan(Path("."), task={"name": "classify"}, loss={"name": "cross_entropy"}).config
    outputs = [([2.0, 0.0], 0.0), ([2.0, 0.0], 1.0), ([1.0, 1.0], 1.0)]
    records = {i: evaluate.Scored([logits], [label], [0.0]) for i, (logits, label) in enumerate(outputs)}
    found = evaluate.numbers(evaluate.Outputs(records=records), config)
    logits, labels = torch.tensor([z for z, _ in outputs]), torch.tensor([0, 1, 1])
    assert found["eval/accuracy"] == 0.5  # equal logits tell nothing: half right
    assert found["eval/loss"] == pytest.approx(F.cross_entropy(logits, labels).item())


def test_the_head_has_the_number_format_of_the_model(tmp_path: Path) -> None:
    """ZeRO-3 takes all that trains as one: DeepSpeed, runtime/zero/utils.py, defragment."""
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=8)),
        get_input_embeddings=lambda: torch.nn.Embedding(4, 8, dtype=torch.bfloat16),
    )
    plan = tiny_plan(tmp_path, task={"name": "classify", "classes": ["a", "b"]})
    assert make_head(plan, model, {}, torch.device("cpu")).weight.dtype == torch.bfloat16
