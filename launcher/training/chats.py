"""Chats as token ids with a mask of their answers; the model's own chat template renders them.

The template renders a whole chat as one text, in which special tokens that users wrote are broken by a mark. What
is between the template's own special tokens is then tokenised in one run, the mark taken out: so ids are those of
`processor.apply_chat_template`, and user text is text whatever it contains.

Shapes: L tokens of one prompt.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from launcher.errors import ConfigError, Problem
from launcher.spec import RunPlan
from launcher.training.encoding import Encoded
from launcher.training.jsonl import RowError
from launcher.training.pieces import Part, PieceEncoder, Prompt
from launcher.training.prompts import Piece, Special, Text
from launcher.training.rows import Chat, Content, Group, Image, Row, Turn, Video

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"  # what templates of hybrid models put before an answer without thoughts
TOOL_RESULT = "user\n<tool_response>"  # templates show a tool's result as a user's turn
START, END = Special("<|im_start|>"), Special("<|im_end|>")
ANSWER_TOKENS = 2  # yes or no, and <|im_end|>


class ChatEncoder:
    """Turns chats into prompts: with the loss's answers (task sft), or ready for a class to be read (classify)."""

    def __init__(self, plan: RunPlan, processor: Any, pieces: PieceEncoder, groups: Callable[[Group], Encoded]) -> None:
        """`pieces` makes tokens of pieces; `groups` encodes reranker groups, with room for ANSWER_TOKENS more."""
        self.processor, self.pieces, self.groups, self.task = processor, pieces, groups, plan.config.task
        pieces.cuttable = "a user's longest text"
        specials = [t.content for t in pieces.tokenizer.added_tokens_decoder.values() if t.special]
        # The longest first: one may be the beginning of another.
        self._specials = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))

    def encode(self, row: Row) -> Encoded:
        """One prompt of a chat; of a reranker group one a document, its answer yes or no.

        A chat above `dataset.max_length` loses the end of the longest text of a user: template, answers, images and
        all other texts stay whole. Raises RowError when that is not enough, for a chat without an answer (sft) and
        for a label that is no class.
        """
        if isinstance(row, Group):
            if self.task.name == "classify":
                raise RowError(f"{row.where}: row {row.id}: a query with documents has no class (task=rerank)")
            return self._answered(self.groups(row))
        try:
            prompt = self._prompt(row)
        except RowError as error:
            raise RowError(f"{row.where}: row {row.id}: {error}") from None
        label = self._class(row) if self.task.name == "classify" else 0.0
        return Encoded(row=row, prompts=(prompt,), prefix=0, labels=(label,))

    def _class(self, chat: Chat) -> float:
        if not self.task.classes:  # not known before all rows are read
            return math.nan
        if chat.label not in self.task.classes:
            found = "no label" if chat.label is None else f"label {chat.label!r}, which is none of the classes"
            raise RowError(f"{chat.where}: row {chat.id} has {found}")
        return float(self.task.classes.index(chat.label))

    def _answered(self, group: Encoded) -> Encoded:
        """The group's prompts, each with its answer behind it."""
        prompts = []
        for prompt, label in zip(group.prompts, group.labels, strict=True):
            word = "yes" if label >= 0.5 else "no"  # below 1 it is how likely a document is relevant
            answer = self.pieces.prompt([self.pieces.part(Text(word)), self.pieces.part(END)])
            ids = np.concatenate([prompt.ids, answer.ids])
            positions = np.concatenate([prompt.positions, prompt.positions[:, -1:] + 1 + answer.positions], axis=1)
            prompts.append(Prompt(ids, positions, prompt.media, np.arange(len(ids)) >= len(prompt)))
        return dataclasses.replace(group, prompts=tuple(prompts))

    def _prompt(self, chat: Chat) -> Prompt:
        classify = self.task.name == "classify"
        text, mark = self._rendered(chat, opened=classify)
        runs = _read(text, mark, chat, self._specials, opened=classify)
        parts = self.pieces.parts(_with_trim(runs))
        prompt = self.pieces.prompt(parts)
        if classify:
            return prompt
        answer = np.concatenate([self._mask(run, part) for run, part in zip(runs, parts, strict=True)])
        if not answer.any():
            raise RowError("the chat has no answer to learn")
        return dataclasses.replace(prompt, answer=answer)

    def _mask(self, run: _Run, part: Part) -> np.ndarray:
        """Which of a piece's tokens are an answer; one that holds the header's newline too is not."""
        if run.answer and run.header:
            assert isinstance(run.piece, Text)
            return np.array([begin >= run.header for begin, _ in self.pieces.offsets(run.piece.text)])
        return np.full(len(part), run.answer)

    def _rendered(self, chat: Chat, *, opened: bool) -> tuple[str, str]:
        """The chat as the model's template shows it, and the mark inside special tokens that users wrote."""
        turns = chat.turns
        if self.task.system is not None and not any(turn.role == "system" for turn in turns):
            turns = (Turn("system", (self.task.system,)), *turns)
        written = "".join(part for turn in turns for part in turn.content if isinstance(part, str))
        mark = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in written)  # of Unicode's private use
        messages = [{"role": turn.role, "content": self._content(turn.content, mark)} for turn in turns]
        try:
            return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened), mark
        except TemplateError as error:  # of turns in an order that the model knows nothing of, say
            raise RowError(f"the model's chat template refuses it: {error}") from None

    def _content(self, content: Content, mark: str) -> str | list[dict[str, str]]:
        shown: list[dict[str, str]] = []
        for part in content:
            if isinstance(part, str):
                text = self._specials.sub(lambda match: match[0][0] + mark + match[0][1:], part)
                shown.append({"type": "text", "text": text})
            else:
                shown.append({"type": "image" if isinstance(part, Image) else "video"})
        if all(part["type"] == "text" for part in shown):
            return "".join(part["text"] for part in shown)  # templates of text models take nothing else
        return shown


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """A piece of a rendered chat: whether it is an answer or a user's, and how many characters of its own header."""

    piece: Piece
    answer: bool = False
    user: bool = False
    header: int = 0


def _read(text: str, mark: str, chat: Chat, specials: re.Pattern[str], *, opened: bool) -> list[_Run]:
    """A rendered chat as pieces: media in place of their placeholders, `mark` taken out of texts.

    `opened` says that an assistant's turn without text stands at the end.
    """
    media = [part for turn in chat.turns for part in turn.content if isinstance(part, Image | Video)]
    answers = [turn for turn in chat.turns if turn.role == "assistant"]
    shown, told = 0, 0  # media and answers so far
    runs: list[_Run] = []
    role, learnt = "", False
    for piece in _split(text, specials):
        before = runs[-1].piece if runs else None
        if isinstance(piece, Text):
            own, header = piece.text.replace(mark, ""), 0
            if before == START:
                role = "tool" if own.startswith(TOOL_RESULT) else own.partition("\n")[0]
                header = len(own.partition("\n")[0]) + 1
                if role == "assistant" and told < len(answers):
                    learnt = answers[told].train
                    header += _thought(own[header:], answers[told])
                told += role == "assistant"
            runs.append(_Run(Text(own), learnt, role == "user", header))
        elif piece.text in ("<|image_pad|>", "<|video_pad|>"):
            if shown < len(media):
                runs[-1] = _Run(media[shown])  # in place of <|vision_start|>: a medium brings that with it
            shown += 1
        elif not (piece.text == "<|vision_end|>" and isinstance(before, Image | Video)):
            runs.append(_Run(piece, learnt))
            if piece == END:
                role, learnt = "", False
    # Otherwise the loss would be on other turns than the row says, or images go to other places.
    if (shown, told) != (len(media), len(answers) + opened):
        raise RowError(
            f"the model's chat template shows {shown} images and videos and {told - opened} "
            f"assistant turns of this chat, which has {len(media)} and {len(answers)}"
        )
    return runs


def _with_trim(runs: list[_Run]) -> list[Piece]:
    """The pieces; the end of the longest text of a user may be cut where the chat is too long."""
    own = [len(run.piece.text) - run.header if run.user and isinstance(run.piece, Text) else 0 for run in runs]
    pieces = [run.piece for run in runs]
    longest = own.index(max(own))
    piece = pieces[longest]
    if own[longest] and isinstance(piece, Text):
        pieces[longest] = Text(piece.text, trim=own[longest])
    return pieces


def _split(text: str, specials: re.Pattern[str]) -> Iterator[Special | Text]:
    """The template's special tokens and the texts between them."""
    at = 0
    for match in specials.finditer(text):
        if match.start() > at:
            yield Text(text[at : match.start()])
        yield Special(match[0])
        at = match.end()
    if at < len(text):
        yield Text(text[at:])


def _thought(text: str, turn: Turn) -> int:
    """Characters of an empty thought that the template, not the row, put before an answer."""
    written = "".join(part for part in turn.content if isinstance(part, str))
    return len(EMPTY_THOUGHT) if text.startswith(EMPTY_THOUGHT) and "</think>" not in written else 0


def with_classes(plan: RunPlan, rows: Sequence[Row], saved: Sequence[str] | None = None) -> RunPlan:
    """The plan with the names of its classes, and with the parameters of the head that they make.

    They are `task.classes`, else those of the checkpoint that the run goes on from (`saved`), else the labels of the
    training rows, sorted. Raises ConfigError when there are fewer than two.
    """
    if plan.config.task.name != "classify":
        return plan
    classes = list(plan.config.task.classes or saved or sorted(_labels(rows)))
    if len(classes) < 2:
        text = f"task=classify needs two classes or more, and the training rows have {len(classes)}: {classes}"
        raise ConfigError(Problem(text, tries=("rows with a label each", "task.classes=[...]")), title="with the data")
    task = dataclasses.replace(plan.config.task, classes=classes)
    hidden = (plan.arch.get("text_config") or plan.arch)["hidden_size"]
    return dataclasses.replace(
        plan,
        config=dataclasses.replace(plan.config, task=task),
        trainable={**plan.trainable, "head": len(classes) * hidden},
    )


def _labels(rows: Sequence[Row]) -> set[str]:
    return {row.label for row in rows if isinstance(row, Chat) and row.label is not None}
