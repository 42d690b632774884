"""The published prompts of Qwen's rerankers as a list of pieces. Pure text: no tokenizer, no torch.

Source: the released Qwen3-VL-Reranker and Qwen3-Reranker code; byte-exact, the final newlines included.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.training.rows import Content, Image, Video

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """What stands between the parts of a reranker's prompt."""

    query: str
    document: str
    answer: str  # the assistant's turn, up to where yes or no is read
    empty: str  # instead of no content


STYLES = {  # by Family.prompt
    "vl": Style(query="<Query>:", document="\n<Document>:", answer="assistant\n", empty="NULL"),
    "text": Style(
        query="\n<Query>: ", document="\n<Document>: ", answer="assistant\n<think>\n\n</think>\n\n", empty=""
    ),
}


@dataclass(frozen=True, slots=True)
class Special:
    """A special token of the template. User text never becomes one, whatever it contains."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text tokenised as one run; `trim` characters at its end belong to the document and may be cut."""

    text: str
    trim: int = 0


Piece = Special | Text | Image | Video


def reranker_prompt(instruction: str, query: Content, document: Content, style: str = "vl") -> list[Piece]:
    """The prompt whose last token's hidden state scores `document` for `query`; `style` names one of STYLES.

    Empty content reads `NULL` where images may stand, as in the published code.
    """
    form = STYLES[style]
    start, end = Special("<|im_start|>"), Special("<|im_end|>")
    pieces: list[Piece] = [start, Text(f"system\n{SYSTEM}"), end, Text("\n"), start]
    pieces += [Text(f"user\n<Instruct>: {instruction}{form.query}"), *_content(query, form), Text(form.document)]
    pieces += [*_content(document, form, trim=True), end, Text("\n"), start, Text(form.answer)]
    return _joined(pieces)


def _content(content: Content, form: Style, *, trim: bool = False) -> list[Piece]:
    parts: list[Piece] = [Text(p, len(p) if trim else 0) if isinstance(p, str) else p for p in content if p != ""]
    return parts or [Text(form.empty)]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts merged: tokens may span the border of query and template (`:(` is one token)."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Text) and isinstance(last, Text):
            trim = piece.trim + last.trim if piece.trim == len(piece.text) else piece.trim
            joined[-1] = Text(last.text + piece.text, trim)
        else:
            joined.append(piece)
    return joined
