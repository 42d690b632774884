"""Processors built on the spot: ids, prompts, and what is left after saving and loading."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image as Pillow

from launcher.errors import ConfigError
from launcher.resources import conf_dir
from launcher.spec import ModelConfig, RunConfig, TaskConfig
from launcher.training.bpe import build_tokenizer, learn_merges
from launcher.training.processors import build_processor, load_processor, special_ids, token_ids
from launcher.training.prompts import SYSTEM

PROMPT = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {{instruction}}<Query>:{{query}}\n"
    "<Document>:{document}<|im_end|>\n<|im_start|>assistant\n"
)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
INSTRUCTION = 'Find "ähnliche" {{ 日本 }} \\n pages 🙂.'


class Plan:
    """The two fields of a plan that a processor depends on."""

    def __init__(self, arch: dict[str, Any], **model: Any) -> None:
        self.arch = arch
        task = TaskConfig(name="rerank", instruction=INSTRUCTION)
        self.config = RunConfig(model=ModelConfig(name="m", family="qwen3_vl", **model), task=task)


def arch(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())["arch"]
    return loaded


@pytest.fixture(scope="module")
def tiny() -> Any:
    plan: Any = Plan(arch("tiny"), weights="random", min_pixels=1024, max_pixels=4096)
    return load_processor(plan)


def test_tiny_ids_fit_the_vocabulary(tiny: Any) -> None:
    ids = token_ids(tiny)
    assert len(set(ids.values())) == 6
    assert max(tiny.tokenizer.get_vocab().values()) < arch("tiny")["text_config"]["vocab_size"]
    special = special_ids(tiny.tokenizer)
    assert special["image_token_id"] == ids["image"] == tiny.image_token_id
    assert special["eos_token_id"] == tiny.tokenizer.eos_token_id
    assert special["pad_token_id"] == tiny.tokenizer.pad_token_id


def test_published_ids() -> None:
    processor = build_processor(arch("qwen3_vl_8b"))
    assert token_ids(processor) == {
        "yes": 9693,
        "no": 2152,
        "image": 151655,
        "video": 151656,
        "vision_start": 151652,
        "vision_end": 151653,
    }
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    assert processor.tokenizer.convert_tokens_to_ids(list(names)) == [151643, 151644, 151645, 151667, 151668]
    assert len(processor.tokenizer) == 151669
    assert processor.image_processor.size["longest_edge"] == 1280 * 32 * 32
    vocab = processor.tokenizer.get_vocab()
    ids = processor.tokenizer("any text 123 über \n").input_ids
    assert not any(token.startswith("<|filler") for token in processor.tokenizer.convert_ids_to_tokens(ids))
    assert sorted(vocab.values()) == list(range(151669))


@pytest.mark.parametrize("text", ["the digit seven", "Ünï 日本 🙂 \n\t ''s 1234 <|im_start", "\x00\x7f", " yes no"])
def test_any_text_survives_the_tokenizer(tiny: Any, text: str) -> None:
    tokenizer = tiny.tokenizer
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_one_id_in_templates_only(tiny: Any) -> None:
    text = f"<|im_start|>user\n{IMAGE}<think>"
    ids = tiny.tokenizer(text).input_ids
    assert tiny.tokenizer.convert_ids_to_tokens(ids)[0] == "<|im_start|>"
    literal = tiny.tokenizer(text, split_special_tokens=True).input_ids
    assert not set(literal) & set(tiny.tokenizer.all_special_ids)
    assert tiny.tokenizer.decode(literal) == text


def test_merges_do_not_depend_on_the_order_of_words() -> None:
    words = {tuple("lower"): 2, tuple("lowest"): 2, tuple("new"): 3, tuple("newer"): 1}
    forward = learn_merges(Counter(words), 20)
    backward = learn_merges(Counter(dict(reversed(list(words.items())))), 20)
    assert forward == backward
    assert forward[:2] == [("w", "e"), ("l", "o")]  # five times; then four, before ("n", "e")


def test_too_small_a_vocabulary_is_a_config_error() -> None:
    small = arch("tiny")
    small["text_config"]["vocab_size"] = 290
    with pytest.raises(ConfigError, match="no room for the words yes and no"):
        build_processor(small)


def test_words_of_two_tokens_are_refused(tiny: Any) -> None:
    """R04."""

    class Processor:
        tokenizer = build_tokenizer(512, published=False)

    Processor.tokenizer.add_tokens(["ye"])
    with pytest.raises(ConfigError, match="'yes' as tokens"):
        token_ids(Processor)


@pytest.mark.parametrize("flag", [{}, {"add_generation_prompt": True}])
def test_reranker_template_is_the_published_prompt(tiny: Any, flag: dict[str, bool]) -> None:
    """R03: the answer's beginning stands there once."""

    def render(query: Any, document: Any, *extra: dict[str, str], **options: Any) -> str:
        messages = [*extra, {"role": "query", "content": query}, {"role": "document", "content": document}]
        text: str = tiny.apply_chat_template(messages, chat_template="reranker", tokenize=False, **flag, **options)
        return text

    items = [{"type": "text", "text": "a\n"}, {"type": "image"}, {"type": "text", "text": ":("}]
    assert render(" q\n", items) == PROMPT.format(instruction=INSTRUCTION, query=" q\n", document=f"{IMAGE}a\n:(")
    assert render("", []) == PROMPT.format(instruction=INSTRUCTION, query="NULL", document="NULL")
    own = {"role": "system", "content": "Own."}
    assert render("q", "d", own) == PROMPT.format(instruction="Own.", query="q", document="d")
    assert render("q", "d", instruction="Given.") == PROMPT.format(instruction="Given.", query="q", document="d")


def test_reranker_template_refuses_other_roles(tiny: Any) -> None:
    """R02."""
    with pytest.raises(Exception, match="role query"):
        tiny.apply_chat_template([{"role": "user", "content": "q"}], chat_template="reranker", tokenize=False)


def test_saved_and_loaded_again(tiny: Any, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path)
    plan: Any = Plan({}, path=str(tmp_path), max_pixels=2048)
    loaded = load_processor(plan)
    messages = [
        {"role": "query", "content": "q"},
        {"role": "document", "content": [{"type": "image"}, {"type": "text", "text": "d"}]},
    ]
    text = tiny.apply_chat_template(messages, chat_template="reranker", tokenize=False)
    assert loaded.apply_chat_template(messages, chat_template="reranker", tokenize=False) == text
    assert loaded.tokenizer(text).input_ids == tiny.tokenizer(text).input_ids
    assert token_ids(loaded) == token_ids(tiny)
    size = loaded.image_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (1024, 2048)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    assert loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>user\n{IMAGE}hi<|im_end|>\n<|im_start|>assistant\n"
    )
    batch = loaded(text=[text], images=[Pillow.new("RGB", (64, 64))], return_tensors="pt")
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert (batch["input_ids"] == token_ids(loaded)["image"]).sum() == 1


def test_a_folder_with_other_templates_or_a_larger_tokenizer(tiny: Any, tmp_path: Path) -> None:
    """R12: whatever templates a folder has, ours scores; Z11: embeddings are never resized."""
    tiny.save_pretrained(tmp_path)
    plan: Any = Plan({"text_config": {"vocab_size": 512}}, path=str(tmp_path))
    reranker = tmp_path / "additional_chat_templates" / "reranker.jinja"
    reranker.write_text("{{ messages[9].content }}")
    (tmp_path / "chat_template.jinja").unlink()
    chat = [{"role": "user", "content": "q"}]
    pair = [{"role": "query", "content": "q"}, {"role": "document", "content": "d"}]
    for _ in range(2):
        loaded = load_processor(plan)
        assert "q" in loaded.apply_chat_template(chat, tokenize=False)
        assert "<Query>:q\n<Document>:d" in loaded.apply_chat_template(pair, chat_template="reranker", tokenize=False)
        if reranker.exists():  # then without any template
            reranker.unlink()
    plan.arch["text_config"]["vocab_size"] = len(loaded.tokenizer) - 1
    with pytest.raises(ConfigError, match="tokens and the model's embeddings"):
        load_processor(plan)


def test_a_folder_without_a_processor_is_a_config_error(tmp_path: Path) -> None:
    plan: Any = Plan({}, path=str(tmp_path))
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        load_processor(plan)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer and image processor") as caught:
        load_processor(plan)
    assert "model.weights=random" in caught.value.problems[0].tries
