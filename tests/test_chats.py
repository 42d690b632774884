"""Chats as token ids: those of the model's own template, with the loss on what the assistant says and nowhere else."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from launcher.errors import ConfigError
from launcher.training import processors
from launcher.training.chats import with_classes
from launcher.training.encoding import make_encoder
from launcher.training.jsonl import RowError
from launcher.training.rows import Chat, Content, Image, Turn
from tests.groups import GROUPS, group, picture
from tests.tiny import tiny_plan

# As Qwen3's own does: thoughts stay in the last answer alone, and an empty one is put where the row has none.
HYBRID = """
{%- for message in messages -%}
  {%- set text = message.content -%}
  {%- if message.role == 'assistant' -%}
    {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in text else '' -%}
    {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
    {%- if loop.last -%}{%- set text = '<think>\\n' + thought + '\\n</think>\\n\\n' + text -%}{%- endif -%}
  {%- endif -%}
  {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".strip()


def chat(*turns: tuple[str, Content] | tuple[str, Content, bool], label: str | None = None) -> Chat:
    """A chat whose assistant's turns are answers unless a third entry says that they aren't."""
    made = tuple(Turn(role, content, (more or (True,))[0] and role == "assistant") for role, content, *more in turns)
    return Chat("c", "test:1", made, label)


CHATS = {
    "text": chat(("user", ("what is it?",)), ("assistant", ("a ring of the door",))),
    "system": chat(("system", ("be brief",)), ("user", ("why",)), ("assistant", ("because",))),
    "several turns": chat(
        ("user", ("one :( ",)), ("assistant", ("\nfirst\n\n",)), ("user", ("",)), ("assistant", (" (two)",))
    ),
    "images": chat(
        ("user", (picture(1), "what is\n", picture(2, 32, 96))), ("assistant", ("a red door",)),
        ("user", ("and this? ", picture(1))), ("assistant", ("the river",)),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return processors.load_processor(tiny_plan(tmp_path_factory.mktemp("run")))


def encoder(tmp_path: Path, processor: Any, *, task: str = "sft", **options: Any) -> Any:
    dataset = {"max_length": options.pop("max_length", 1024)}
    plan = tiny_plan(tmp_path, task={"name": task, **options}, loss={"name": "cross_entropy"}, dataset=dataset)
    return make_encoder(plan, processor)


def answers(processor: Any, prompt: Any) -> str:
    return str(processor.tokenizer.decode(prompt.ids[prompt.answer]))


def messages(row: Chat) -> tuple[list[dict[str, Any]], list[Any]]:
    images = [PIL.Image.open(io.BytesIO(p.data)) for t in row.turns for p in t.content if isinstance(p, Image)]
    items = [[{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in t.content]
             for t in row.turns]  # fmt: skip
    return [{"role": t.role, "content": c} for t, c in zip(row.turns, items, strict=True)], images


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("task", ["sft", "classify"])
def test_ids_are_those_of_the_processor(processor: Any, tmp_path: Path, kind: str, task: str) -> None:
    turns, images = messages(CHATS[kind])
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=task == "classify")
    wanted = processor(text=[text], images=images or None, return_tensors="np").input_ids[0]
    (prompt,) = encoder(tmp_path, processor, task=task).encode(CHATS[kind]).prompts
    assert prompt.ids.tolist() == wanted.tolist() and len(prompt.media) == len(images)


@pytest.mark.parametrize("kind", CHATS)
def test_the_loss_is_on_answers_and_their_end(processor: Any, tmp_path: Path, kind: str) -> None:
    row = CHATS[kind]
    (prompt,) = encoder(tmp_path, processor).encode(row).prompts
    said = [turn.content[0] for turn in row.turns if turn.role == "assistant"]
    assert answers(processor, prompt) == "".join(f"{text}<|im_end|>" for text in said)
    unheard = dataclasses.replace(row, turns=tuple(dataclasses.replace(t, train=False) for t in row.turns))
    with pytest.raises(RowError, match="test:1: row c: the chat has no answer to learn"):
        encoder(tmp_path, processor).encode(unheard)


def test_turns_that_are_not_learnt_are_not_in_the_loss(processor: Any, tmp_path: Path) -> None:
    row = chat(("user", ("a",)), ("assistant", ("wrong",), False), ("user", ("b",)), ("assistant", ("right",)))
    (prompt,) = encoder(tmp_path, processor).encode(row).prompts
    assert answers(processor, prompt) == "right<|im_end|>"


def test_special_tokens_in_texts_are_text(processor: Any, tmp_path: Path) -> None:
    """I18."""
    text = "<image> <|image_pad|><|im_end|>\n<|im_start|>assistant\n\ue000"
    row = chat(("user", (picture(1), text)), ("assistant", ("<|vision_start|><|im_end|> it is",)))
    (prompt,) = encoder(tmp_path, processor).encode(row).prompts
    plain = chat(("user", (picture(1), "x")), ("assistant", ("x",)))
    (wanted,) = encoder(tmp_path, processor).encode(plain).prompts
    specials = [t.content for t in processor.tokenizer.added_tokens_decoder.values() if t.special]
    ids = processor.tokenizer.convert_tokens_to_ids(specials)
    for prompt_ in (prompt, wanted):
        assert np.isin(prompt_.ids, ids).any()
    assert prompt.ids[np.isin(prompt.ids, ids)].tolist() == wanted.ids[np.isin(wanted.ids, ids)].tolist()
    assert text in processor.tokenizer.decode(prompt.ids)
    assert answers(processor, prompt) == "<|vision_start|><|im_end|> it is<|im_end|>"


def test_thoughts_follow_the_template(processor: Any, tmp_path: Path) -> None:
    import copy

    hybrid = copy.copy(processor)
    hybrid.chat_template = HYBRID
    made = encoder(tmp_path, hybrid)
    thought = "<think>\nlong\n</think>\n\nyes"
    history = chat(("user", ("a",)), ("assistant", (thought,)), ("user", ("b",)), ("assistant", ("no",)))
    (prompt,) = made.encode(history).prompts
    assert "long" not in hybrid.tokenizer.decode(prompt.ids) and "<think>\n\n</think>" in hybrid.tokenizer.decode(
        prompt.ids
    )
    assert answers(hybrid, prompt) == "yes<|im_end|>no<|im_end|>"  # the template's empty thought is no answer
    (prompt,) = made.encode(chat(("user", ("a",)), ("assistant", (thought,)))).prompts
    assert answers(hybrid, prompt) == f"{thought}<|im_end|>"
    hybrid.chat_template = "{{- '<|im_start|>user\\n' + messages[0].content + '<|im_end|>\\n' -}}"
    with pytest.raises(RowError, match="0 images and videos and 0 assistant turns of this chat, which has 0 and 2"):
        made.encode(history)


def test_a_long_chat_loses_the_end_of_its_longest_question(processor: Any, tmp_path: Path) -> None:
    row = chat(
        ("system", ("word " * 30,)), ("user", (picture(1), "short")), ("assistant", ("answer " * 30,)),
        ("user", ("start " + "long " * 200,)), ("assistant", ("the end",)),
    )  # fmt: skip
    (whole,), (cut,) = (encoder(tmp_path, processor, max_length=n).encode(row).prompts for n in (2000, 600))
    assert len(whole) > 600 and len(cut) == 600
    assert answers(processor, cut) == answers(processor, whole) == "answer " * 30 + "<|im_end|>the end<|im_end|>"
    tail = len(processor.tokenizer("<|im_end|>\n<|im_start|>assistant\nthe end<|im_end|>\n").input_ids)
    assert cut.ids[-tail:].tolist() == whole.ids[-tail:].tolist()
    assert cut.ids[:-tail].tolist() == whole.ids[: 600 - tail].tolist()
    with pytest.raises(RowError, match="test:1: row c: .*dataset.max_length=90; only the end of a user's longest"):
        encoder(tmp_path, processor, max_length=90).encode(row)


def test_the_system_message_of_rows_without_one(processor: Any, tmp_path: Path) -> None:
    made = encoder(tmp_path, processor, system="be kind")
    first = [processor.tokenizer.decode(made.encode(CHATS[kind]).prompts[0].ids) for kind in ("text", "system")]
    assert first[0].startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nwhat")
    assert first[1].startswith("<|im_start|>system\nbe brief<|im_end|>\n") and "kind" not in first[1]


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_are_answered_yes_and_no(processor: Any, tmp_path: Path, kind: str) -> None:
    plain = make_encoder(tiny_plan(tmp_path), processor)
    for one in GROUPS[kind]:
        scored, told = plain.encode(one), encoder(tmp_path, processor).encode(one)
        assert told.prefix == scored.prefix
        for before, prompt, label in zip(scored.prompts, told.prompts, one.labels, strict=True):
            assert prompt.ids[: len(before)].tolist() == before.ids.tolist()
            assert answers(processor, prompt) == ("yes" if label else "no") + "<|im_end|>"
            assert (np.diff(prompt.positions[:, len(before) - 1 :]) == 1).all()
    long = encoder(tmp_path, processor, max_length=260).encode(group(("the query",), ("word " * 400,), ("b",)))
    assert len(long.prompts[0]) == 260
    likely = dataclasses.replace(group(("q",), ("a",), ("b",)), labels=(0.8, 0.1))
    told = encoder(tmp_path, processor).encode(likely)
    assert [answers(processor, prompt) for prompt in told.prompts] == ["yes<|im_end|>", "no<|im_end|>"]


def test_classes_come_from_the_rows_or_the_plan(processor: Any, tmp_path: Path) -> None:
    rows = [chat(("user", (text,)), label=text) for text in ("b", "a", "c", "a")]
    plan = tiny_plan(tmp_path, task={"name": "classify"}, loss={"name": "cross_entropy"})
    told = with_classes(plan, rows)
    assert told.config.task.classes == ["a", "b", "c"] and told.trainable["head"] == 3 * 128
    assert with_classes(plan, rows[:1], saved=["c", "b"]).config.task.classes == ["c", "b"]
    assert [make_encoder(told, processor).encode(row).labels for row in rows] == [(1.0,), (0.0,), (2.0,), (0.0,)]
    with pytest.raises(RowError, match="row c has label 'd', which is none of the classes"):
        make_encoder(told, processor).encode(chat(("user", ("x",)), label="d"))
    with pytest.raises(ConfigError, match="two classes or more, and the training rows have 1"):
        with_classes(plan, rows[:1])
    with pytest.raises(RowError, match="has no class"):
        make_encoder(told, processor).encode(GROUPS["text"][0])
