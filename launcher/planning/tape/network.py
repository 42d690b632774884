"""The pieces of a model as it is tuned: every kind of layer is recorded once."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from launcher.families import trains_fully
from launcher.planning.models import lora_modules
from launcher.planning.shapes import Shape, VisionShape
from launcher.planning.tape import decoder, vision
from launcher.planning.tape import operations as op
from launcher.planning.tape.decoder import Packing
from launcher.planning.tape.parts import FEATURES, PATCHES, TOKENS, VISUAL, Tuned
from launcher.planning.tape.pieces import Piece, record
from launcher.planning.tape.recorder import ZERO, Form, Tape, Value, form, plus, times
from launcher.spec import TuneConfig

DOCUMENTS, ANSWERS = form(documents=1), form(answers=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """Pieces of a vision tower."""

    rotary: Form  # kept by blocks that keep anything
    locals: Form  # of the tower's frame
    patches: Piece
    blocks: tuple[Piece, ...]
    maps: tuple[int, ...]  # blocks that a feature map is taken after
    mapper: Piece  # makes one
    merger: Piece
    state: Form  # hidden states between blocks
    feature: Form  # one map, or the merged features


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The pieces of a model as it is tuned, in the order of the forward pass."""

    batch: Form  # of the micro-batch, with rotary positions: alive throughout
    wide: bool  # float32: norms keep what they are given
    mask: Form  # of padded rows: a local too, and kept for layers with attention that are recomputed
    attending: frozenset[int]
    locals: Form  # held by the frames of the forward pass until the language model is done
    tower: Tower | None
    embeddings: Piece
    decoder: tuple[Piece, ...]
    deepstack: Piece | None
    maps: int  # decoder layers that a feature map is added after
    waiting: Form  # the gradient of one map, which waits for the tower's backward pass
    tied: Form  # the gradient of a weight that is both head and embeddings: from the head's backward pass to the end
    norm: Piece
    head: Piece


@functools.lru_cache(maxsize=256)
def network(shape: Shape, tune: TuneConfig, task: str, width: int, packing: Packing, sees: bool) -> Network:
    """The pieces of a model; `width` is its format's bytes, and whether a micro-batch `sees` an image."""
    h, tuned = shape.hidden, _tuned(shape, tune)
    tower = _tower(shape, tune, width) if sees and shape.vision else None
    maps = shape.vision.deepstack if tower and shape.vision else 0
    of_images = tower is not None and (tune.vision != "frozen" or tune.projector != "frozen")
    embedded = trains_fully("embeddings", tune)
    merged = [(FEATURES, h, width, of_images)] if tower else []
    wants, layers = embedded or of_images, []
    for n in range(shape.layers):
        kind = replace(tuned["language"], adapted=_inside(shape, tune, f"{shape.family.language}.layers.{n}."))
        layers.append(_layer(shape, n in shape.attending, kind, width, wants, packing))
        wants = wants or tune.language != "frozen"
    rows = (TOKENS, h, width, layers[0].kept != ZERO)
    features = times(plus(times(VISUAL, maps), times(FEATURES, maps + 1)), h * width) if tower else ZERO
    return Network(
        batch=_batch(shape, width, tower is not None),
        wide=width == op.FLOAT,
        attending=shape.attending,
        mask=form(squares=op.BOOL) if shape.family.recurrent else ZERO,
        locals=plus(times(TOKENS, h * width), features),
        tower=tower,
        embeddings=record(
            lambda tape, *x: decoder.embed_tokens(x[0] if x else None, shape, tape, width, trains=embedded), *merged
        ),
        decoder=tuple(layers),
        deepstack=record(lambda _, x, y: vision.deepstack(x, y), rows, (VISUAL, h, width, of_images)) if maps else None,
        maps=maps,
        waiting=times(VISUAL, h * width) if of_images else ZERO,
        tied=form(one=shape.vocab * h * width) if task == "sft" and shape.tied and embedded else ZERO,
        norm=record(lambda _, x: decoder.last_hidden(x, shape, tuned["language"]), (TOKENS, h, width, wants)),
        head=_head(shape, tune, task, width, wants or tune.language == "full"),
    )


def _tower(shape: Shape, tune: TuneConfig, width: int) -> Tower:
    v, tuned = shape.vision, _tuned(shape, tune)
    assert v is not None
    patches = record(lambda tape: vision.embed_patches(_pixels(tape, v, width), v, tuned["vision"]))
    wants, blocks = tune.vision == "full", []
    for n in range(v.depth):
        kind = replace(tuned["vision"], adapted=_inside(shape, tune, f"model.visual.blocks.{n}."))
        blocks.append(_block(v, kind, width, wants))
        wants = wants or tune.vision != "frozen"
    kind = replace(tuned["projector"], adapted=_inside(shape, tune, "model.visual.merger."))
    state = (PATCHES, v.hidden, width, wants)
    rotary = times(PATCHES, 2 * op.FLOAT * (v.hidden // v.heads))
    mixed = ZERO if v.kind == "qwen2_5" else times(PATCHES, 4 * (op.LONG + op.FLOAT) + op.FLOAT * v.hidden)
    return Tower(
        rotary=rotary,
        locals=plus(times(PATCHES, 2 * op.LONG), mixed),
        patches=patches,
        blocks=tuple(blocks),
        maps=v.maps,
        mapper=record(lambda _, x: vision.merger(x, v, kind, after=True), state),
        merger=record(lambda _, x: vision.merger(x, v, kind, after=False), state),
        state=times(PATCHES, v.hidden * width),
        feature=times(FEATURES, shape.hidden * width),
    )


def _pixels(tape: Tape, v: VisionShape, width: int) -> Value:
    """The tower's input, whose storage is the micro-batch's."""
    return Value(tape.new(ZERO, 0, 0).storage, PATCHES, v.patch_values, width)


def _tuned(shape: Shape, tune: TuneConfig) -> dict[str, Tuned]:
    """How each part's linear layers train; which have adapters differs by layer."""
    common = {"adapted": frozenset[str](), "r": tune.r, "dropout": tune.lora_dropout > 0, "dora": tune.use_dora}
    return {
        part: Tuned(
            whole=trains_fully(part, tune),
            four_bit=part == "language" and tune.name == "qlora",
            **common,  # type: ignore[arg-type]
        )
        for part in ("language", "vision", "projector")
    }


@functools.lru_cache(maxsize=64)
def _adapted(shape: Shape, tune: TuneConfig) -> tuple[str, ...]:
    return tuple(lora_modules(shape, tune))


def _inside(shape: Shape, tune: TuneConfig, prefix: str) -> frozenset[str]:
    """Names inside a layer of the linear modules that have adapters."""
    return frozenset(name.removeprefix(prefix) for name in _adapted(shape, tune) if name.startswith(prefix))


@functools.lru_cache(maxsize=256)
def _layer(shape: Shape, attends: bool, tuned: Tuned, width: int, wants: bool, packing: Packing) -> Piece:
    number = next(n for n in range(shape.layers) if (n in shape.attending) == attends)
    linears = shape.decoder(number)
    return record(
        lambda _, x: decoder.decoder_layer(x, shape, linears, tuned, packing),
        (TOKENS, shape.hidden, width, wants),
    )


@functools.lru_cache(maxsize=64)
def _block(v: VisionShape, tuned: Tuned, width: int, wants: bool) -> Piece:
    return record(lambda _, x: vision.vision_block(x, v, tuned), (PATCHES, v.hidden, width, wants))


def _batch(shape: Shape, width: int, sees: bool) -> Form:
    """A MicroBatch (ids, positions, rows of keys, labels, scores, last, group, document) and rotary angles."""
    total = form(tokens=4 * op.LONG, keys=op.LONG, documents=3 * op.LONG + 2 * op.FLOAT, answers=2 * op.LONG)
    total = plus(total, times(TOKENS, 2 * shape.turning * width))
    if sees and shape.vision:
        total = plus(total, form(patches=shape.vision.patch_values * width, visual=2 * op.LONG, tokens=op.BOOL))
    return total


def _head(shape: Shape, tune: TuneConfig, task: str, width: int, wants: bool) -> Piece:
    trains = tune.head == "full" or (shape.tied and tune.language == "full")

    def build(_: Tape, x: Value) -> Value:
        if task == "sft":
            return op.answer_losses(op.take(x, ANSWERS), shape.vocab, trains=trains)
        return op.linear(op.cast(op.take(x, DOCUMENTS), op.FLOAT), 1, trains=False)

    return record(build, (TOKENS, shape.hidden, width, wants))
