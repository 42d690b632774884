"""A byte-level BPE tokenizer in the shape of Qwen's, learned on the spot from a few sentences.

For models built from random weights when nothing may be downloaded. Plain Python and the same on every rank and
with every version of `tokenizers`: ranks build it separately and must agree.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from launcher.training.prompts import SYSTEM

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
PUBLISHED_FIRST_SPECIAL = 151643  # <|endoftext|>; the others follow in order (Qwen3-VL's tokenizer_config.json)
PUBLISHED_WORDS = {"yes": 9693, "no": 2152}
PUBLISHED_SIZE = PUBLISHED_FIRST_SPECIAL + len(SPECIAL) + len(ADDED)
MERGES = 512 - 256 - len(SPECIAL) - len(ADDED)  # what a vocabulary of 512 has room for

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Words that stand in every document's prompt count most: each token saved there is saved once a document.
CORPUS = " ".join(
    [
        *["yes no\nassistant\n<Document>:\nuser\n<Instruct>: <Query>:\nsystem\n"] * 40,
        *[f"{SYSTEM} Given a search query, retrieve relevant candidates that answer the query.<Query>:"] * 8,
        *(f"<Query>:the digit {word}" for word in _DIGITS for _ in range(4)),
        "a quick brown fox jumps over the lazy dog while red, green and blue pictures of cats show what is there.",
        "Retrieve images or text relevant to the user's query. Find a document image that matches the given query.",
    ]
)


def build_tokenizer(vocab_size: int, *, published: bool) -> Any:
    """A transformers Qwen2Tokenizer with fewer than `vocab_size` ids, "yes" and "no" one token each.

    `published`: the special tokens, "yes" and "no" have the ids of Qwen3-VL's own tokenizer, and the ids that
    nothing uses hold fillers no text can produce. Otherwise ids are contiguous. Raises ValueError when
    `vocab_size` is too small.
    """
    from transformers import Qwen2Tokenizer

    count = MERGES if published else min(MERGES, vocab_size - 256 - len(SPECIAL) - len(ADDED))
    alphabet = byte_alphabet()
    merges = learn_merges(_words(alphabet), count)
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    missing = [word for word in PUBLISHED_WORDS if word not in tokens]
    if missing:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for the words {' and '.join(missing)}")
    tokenizer = Qwen2Tokenizer(
        vocab=_published_vocab(tokens) if published else {t: i for i, t in enumerate((*tokens, *SPECIAL, *ADDED))},
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL),
        model_max_length=262144,
    )
    tokenizer.add_tokens(list(ADDED))
    return tokenizer


def learn_merges(words: Counter[tuple[str, ...]], count: int) -> list[tuple[str, str]]:
    """The `count` most frequent pairs, merged one after the other; ties go to the smaller pair."""
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        joined: Counter[tuple[str, ...]] = Counter()
        for word, times in words.items():
            joined[_merge(word, best)] += times
        words = joined
    return merges


def byte_alphabet() -> list[str]:
    """One printable character for each byte 0 to 255: GPT-2's table, which byte-level tokenizers share."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _words(alphabet: list[str]) -> Counter[tuple[str, ...]]:
    """The corpus as words in the byte alphabet, split as the tokenizer itself splits."""
    from transformers import Qwen2Tokenizer

    bare = Qwen2Tokenizer(vocab={t: i for i, t in enumerate(alphabet)}, merges=[], unk_token=None)
    pieces = bare.backend_tokenizer.pre_tokenizer.pre_tokenize_str(CORPUS)
    return Counter(tuple(piece) for piece, _ in pieces)


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    i = 0
    while i < len(word):
        if word[i : i + 2] == pair:
            out.append("".join(pair))
            i += 2
        else:
            out.append(word[i])
            i += 1
    return tuple(out)


def _published_vocab(tokens: list[str]) -> dict[str, int]:
    """Every id below PUBLISHED_SIZE filled: a vocabulary with holes can't be saved cleanly."""
    ids = dict(zip((*SPECIAL, *ADDED), range(PUBLISHED_FIRST_SPECIAL, PUBLISHED_SIZE), strict=True)) | PUBLISHED_WORDS
    taken = {index: token for token, index in ids.items()}
    rest = iter([token for token in tokens if token not in ids])
    return {taken.get(index) or next(rest, f"<|filler_{index}|>"): index for index in range(PUBLISHED_SIZE)}
