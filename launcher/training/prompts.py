"""The published Qwen3-VL-Reranker prompt as a list of pieces. Pure text: no tokenizer, no torch.

Source: the released Qwen3-VL-Reranker code; byte-exact, the final newline after `assistant` included.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.training.formats import Content, Image

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


@dataclass(frozen=True, slots=True)
class Special:
    """A special token of the template. User text never becomes one, whatever it contains."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text tokenised as one run; `trim` characters at its end belong to the document and may be cut."""

    text: str
    trim: int = 0


Piece = Special | Text | Image


def reranker_prompt(instruction: str, query: Content, document: Content) -> list[Piece]:
    """The prompt whose last token's hidden state scores `document` for `query`.

    Empty content reads `NULL`, as in the published code.
    """
    start, end = Special("<|im_start|>"), Special("<|im_end|>")
    pieces: list[Piece] = [start, Text(f"system\n{SYSTEM}"), end, Text("\n"), start]
    pieces += [Text(f"user\n<Instruct>: {instruction}<Query>:"), *_content(query), Text("\n<Document>:")]
    pieces += [*_content(document, trim=True), end, Text("\n"), start, Text("assistant\n")]
    return _joined(pieces)


def _content(content: Content, *, trim: bool = False) -> list[Piece]:
    parts: list[Piece] = [Text(p, len(p) if trim else 0) if isinstance(p, str) else p for p in content if p != ""]
    return parts or [Text("NULL")]


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
