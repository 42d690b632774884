"""Bytes of one micro-batch beside the model's states: what is kept for the backward pass, and what comes on top.

Every kind of layer is recorded once for a model and a tuning choice (package `tape`), its sizes as linear forms
over the numbers of a micro-batch; an estimate then adds up layers and takes the fullest moment, in microseconds.
Checked against torch's own allocations, traced on tensors without contents (tests/memory_trace.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from launcher.arithmetic import gathers_keys, logit_rows
from launcher.attention_needs import PADDED
from launcher.estimates import Load
from launcher.planning.setting import Setting, kernel_of
from launcher.planning.shapes import Shape
from launcher.planning.tape.decoder import Packing
from launcher.planning.tape.network import Network, Tower, Way, network
from launcher.planning.tape.pieces import Piece
from launcher.planning.tape.recorder import ZERO, Form
from launcher.spec import TuneConfig

WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
TOWER, LANGUAGE, AGAIN = "vision tower", "language layers", "inputs of recomputed layers"
COLOURS, FRAMES = 3, 2  # of a pixel, and of a patch: pictures are shown in both
DECODED = 8192  # patches whose bytes become numbers at a time (launcher.training.patches)
REST, BATCH = "embeddings and head", "micro-batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of one micro-batch."""

    kept: dict[str, int]  # alive when the backward pass begins, by part
    forward: int  # on top of all that, at the fullest moment of the forward pass; 0 where it is below
    backward: int  # on top of all that, at the fullest moment of the backward pass


def activations(setting: Setting, load: Load) -> Activations:
    """Bytes of one micro-batch of a rank. Of a family whose documents are padded rows, `load.tokens` counts padding."""
    kernel = kernel_of(setting)
    padded = setting.device == "cuda" and kernel in PADDED
    way = "own" if not load.key_rows else "gathered" if gathers_keys(load.tokens, load.key_rows) else "cascade"
    package = kernel in ("flash_attention_2", "flash_attention_3")
    how = Way(
        packing=Packing(way=way, padded=padded, package=package, kernel=kernel),
        fused=setting.fused,
        half=setting.precision == "fp16",
        together=setting.stage < 3,
        fast_tower=setting.fast_tower,
    )
    width = WIDTHS[setting.precision]
    tune, task = setting.config.tune, setting.config.task.name
    pixels = setting.config.model.max_pixels
    return _activations(setting.shape, tune, task, width, how, setting.checkpointed_layers, load, pixels)


@functools.lru_cache(maxsize=8192)  # the same for every ZeRO setting that is weighed
def _activations(
    shape: Shape, tune: TuneConfig, task: str, width: int, way: Way, checkpointed: int, load: Load, pixels: int | None
) -> Activations:
    pieces = network(shape, tune, task, width, way, load.patches > 0)
    return _add_up(pieces, checkpointed, _numbers(shape, width, load, pixels))


Numbers = tuple[int, ...]


def _numbers(shape: Shape, width: int, load: Load, pixels: int | None) -> Numbers:
    """What the forms' coefficients are multiplied by, in the order of recorder.NAMES; `pixels` of the largest image."""
    share = shape.vision.merge**2 if shape.vision else 1
    frame = load.patches
    if pixels is not None and shape.vision is not None:
        frame = min(frame, COLOURS * FRAMES * pixels // shape.vision.patch_values)
    longest = -(-load.tokens // max(1, load.documents))
    return (
        1,
        load.tokens,
        load.key_rows,
        load.documents + (1 if load.key_rows else 0),
        load.visual,
        load.patches,
        load.patches // share,
        load.documents,
        (load.key_rows or load.tokens) * longest,
        load.answers,
        min(logit_rows(shape.vocab, width), load.answers),
        min(DECODED, load.patches),
        frame,
        min(load.tokens, max(0, load.key_rows - load.tokens) // 2),  # at most, of two documents or more each
    )


class _Sum:
    """Adds up pieces from the first to the last, noting the fullest moment of both passes."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.kept: dict[str, int] = {}
        self.below = self.forward = self.backward = 0
        self.known: dict[int, tuple[int, int, int, int, int, int]] = {}

    def bytes(self, moment: Form) -> int:
        return sum(a * b for a, b in zip(moment, self.numbers, strict=True))

    def keep(self, part: str, size: int) -> None:
        self.kept[part] = self.kept.get(part, 0) + size
        self.below += size

    def add(self, part: str, piece: Piece, *, again: bool = False, during: int = 0, after: int = 0) -> None:
        """One more piece; `during` bytes are alive in its forward pass beside what is kept, `after` in its backward."""
        kept, ahead, back, kept_input, ahead_only, twice = self._sizes(piece)
        if again:
            kept, ahead, back = kept_input, ahead_only, twice
        self.forward = max(self.forward, self.below + during + ahead)
        self.backward = max(self.backward, self.below + after + back)
        self.keep(AGAIN if again else part, kept)

    def _sizes(self, piece: Piece) -> tuple[int, int, int, int, int, int]:
        if (found := self.known.get(id(piece))) is None:
            most = [max(map(self.bytes, m)) for m in (piece.forward, piece.backward, piece.forward_only, piece.again)]
            kept, taken = self.bytes(piece.kept), self.bytes(piece.kept_input)
            self.known[id(piece)] = found = (kept, most[0], most[1], taken, most[2], most[3])
        return found


def _add_up(model: Network, checkpointed: int, numbers: Numbers) -> Activations:
    total = _Sum(numbers)
    total.keep(BATCH, total.bytes(model.batch))
    waiting, tied = total.bytes(model.waiting), total.bytes(model.tied)
    if model.tower is not None:
        _add_tower(total, model.tower, checkpointed > 0, tied)
    held = total.bytes(model.locals)
    held += (mask := total.bytes(model.mask))
    if checkpointed or model.keeps_input:  # the first layer's input is kept, and the same tensor
        held -= total.bytes(model.decoder[0].kept_input)
    total.add(REST, model.embeddings, during=held, after=waiting * model.maps + tied)
    keeps_mask = min((n for n in model.attending if n < checkpointed), default=None)
    for n, piece in enumerate(model.decoder):
        if n == keeps_mask:
            total.keep(AGAIN, mask)
            held -= mask
        later = tied + waiting * max(0, model.maps - n)
        total.add(LANGUAGE, piece, again=n < checkpointed, during=held, after=later)
        if n < model.maps and model.deepstack is not None:
            total.add(LANGUAGE, model.deepstack, during=held, after=later - waiting)
    total.add(REST, model.norm, during=held, after=tied)
    total.add(REST, model.head)
    everything = total.below
    return Activations(
        kept=total.kept,
        forward=max(0, total.forward - everything),
        backward=max(0, total.backward - everything),
    )


def _add_tower(total: _Sum, tower: Tower, again: bool, tied: int) -> None:
    held, feature, state, rotary = map(total.bytes, (tower.locals, tower.feature, tower.state, tower.rotary))
    for moment in (tower.decoding, tower.tables):
        total.forward = max(total.forward, total.below + total.bytes(moment))
    if any(block.kept != ZERO for block in tower.blocks):
        total.keep(TOWER, rotary)
    else:
        held += rotary
    total.add(TOWER, tower.patches, during=held, after=tied + feature * len(tower.maps))
    for n, piece in enumerate(tower.blocks):
        made = sum(m < n for m in tower.maps)
        waiting = tied + feature * made
        total.add(TOWER, piece, again=again, during=held + feature * made, after=waiting)
        if n in tower.maps:
            total.add(TOWER, tower.mapper, during=held + feature * made, after=waiting + state)
            if piece.kept != ZERO:  # what the mapper keeps of its input, the next block or the merger keeps too
                total.keep(TOWER, -state)
    total.add(TOWER, tower.merger, during=held + feature * len(tower.maps), after=tied + feature * len(tower.maps))
