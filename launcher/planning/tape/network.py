"""The pieces of a model as it is tuned: every kind of layer is recorded once."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from launcher.families import trains_fully
from launcher.planning.models import lora_modules
from launcher.planning.shapes import Shape, VisionShape
from launcher.planning.tape import decoder, fused, vision
from launcher.planning.tape import operations as op
from launcher.planning.tape.decoder import Packing
from launcher.planning.tape.parts import FEATURES, PATCHES, TOKENS, VISUAL, Tuned, rms_norm
from launcher.planning.tape.pieces import Piece, record
from launcher.planning.tape.recorder import ZERO, Form, Tape, Value, form, plus, times
from launcher.spec import TuneConfig

DOCUMENTS, ANSWERS = form(documents=1), form(answers=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """Pieces of a vision tower."""

    decoding: Form  # numbers of all pixels, and what makes some of them
    tables: Form  # what making them takes
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
    keeps_input: bool  # the first layer keeps what it is given: float32 norms do, and the fused functions
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How layers are computed."""

    packing: Packing
    fused: bool = False  # by launcher.training.fused
    half: bool = False  # in float16
    together: bool = False  # frozen weights lie together with their adapters (launcher.training.fused.projections)
    fast_tower: bool = False  # the vision tower by launcher.training.vision_tower: it is frozen


@functools.lru_cache(maxsize=256)
def network(shape: Shape, tune: TuneConfig, task: str, width: int, way: Way, sees: bool) -> Network:
    """The pieces of a model; `width` is its format's bytes, and whether a micro-batch `sees` an image."""
    h, tuned = shape.hidden, _tuned(shape, tune)
    tower = _tower(shape, tune, width, way.fast_tower) if sees and shape.vision else None
    maps = shape.vision.deepstack if tower and shape.vision else 0
    of_images = tower is not None and (tune.vision != "frozen" or tune.projector != "frozen")
    embedded = trains_fully("embeddings", tune)
    merged = [(FEATURES, h, width, of_images)] if tower else []
    wants, layers = embedded or of_images, list[Piece]()
    few = _read(task) if way.fused and maps < shape.layers else None  # rows of the last layer's second half
    for n in range(shape.layers):
        kind = replace(tuned["language"], adapted=_inside(shape, tune, f"{shape.family.language}.layers.{n}."))
        if n == 0:
            keeps = width == op.FLOAT or (way.fused and (wants or kind.whole or _adapts_qkv(kind)))
        last = few if n == shape.layers - 1 else None
        layers.append(_layer(shape, n in shape.attending, kind, width, wants, way, last))
        wants = wants or tune.language != "frozen"
    rows = (TOKENS, h, width, layers[0].kept != ZERO)
    add_maps = vision.add_maps if way.fused else vision.deepstack
    features = times(plus(times(VISUAL, maps), times(FEATURES, maps + 1)), h * width) if tower else ZERO
    return Network(
        batch=_batch(shape, width, tower is not None),
        keeps_input=keeps,
        attending=shape.attending,
        mask=form(squares=op.BOOL) if shape.family.recurrent else ZERO,
        locals=plus(times(TOKENS, h * width), features),
        tower=tower,
        embeddings=record(
            lambda tape, *x: decoder.embed_tokens(x[0] if x else None, shape, tape, width, trains=embedded), *merged
        ),
        decoder=tuple(layers),
        deepstack=record(lambda _, x, y: add_maps(x, y), rows, (VISUAL, h, width, of_images)) if maps else None,
        maps=maps,
        waiting=times(VISUAL, h * width) if of_images else ZERO,
        tied=form(one=shape.vocab * h * width) if task == "sft" and shape.tied and embedded else ZERO,
        norm=_norm(shape, tuned["language"], width, wants, way, few, _read(task)),
        head=_head(shape, tune, task, width, wants or tune.language == "full"),
    )


def _tower(shape: Shape, tune: TuneConfig, width: int, fast: bool) -> Tower:
    v, tuned = shape.vision, _tuned(shape, tune)
    assert v is not None
    kind = replace(tuned["projector"], adapted=_inside(shape, tune, "model.visual.merger."))
    state = (PATCHES, v.hidden, width, tune.vision != "frozen")
    numbers = ZERO if tune.vision == "full" else times(PATCHES, v.patch_values * width)  # of pixels: kept by the first
    index = v.patch_values // 2  # bytes of a patch: pictures are the same in both frames
    common = {
        "maps": v.maps,
        "decoding": form(
            patches=v.patch_values * width,
            decoded=index * (op.INDEX + width),
            tokens=-2 * shape.turning * width,  # rotary angles, which the micro-batch counts, come later
        ),
        "mapper": record(lambda _, x: vision.merger(x, v, kind, after=True), state),
        "merger": record(lambda _, x: vision.merger(x, v, kind, after=False), state),
        "state": times(PATCHES, v.hidden * width),
        "feature": times(FEATURES, shape.hidden * width),
    }
    if fast:
        return _fast_tower(v, width, numbers, common)
    patches = record(lambda tape: vision.embed_patches(_pixels(tape, v, width, tune.vision), v, tuned["vision"]))
    wants, blocks = tune.vision == "full", []
    for n in range(v.depth):
        block = replace(tuned["vision"], adapted=_inside(shape, tune, f"model.visual.blocks.{n}."))
        blocks.append(_block(v, block, width, wants))
        wants = wants or tune.vision != "frozen"
    corners = 0 if tune.vision == "full" else 4 * (op.LONG + op.FLOAT)  # else kept for the positions' gradient
    mixed = ZERO if v.kind == "qwen2_5" else times(PATCHES, corners + op.FLOAT * v.hidden)
    return Tower(
        rotary=times(PATCHES, 2 * op.FLOAT * (v.hidden // v.heads)),
        locals=plus(numbers, plus(times(PATCHES, 2 * op.LONG), mixed)),
        tables=ZERO,
        patches=patches,
        blocks=tuple(blocks),
        **common,  # type: ignore[arg-type]
    )


def _fast_tower(v: VisionShape, width: int, numbers: Form, common: dict[str, object]) -> Tower:
    """Of launcher.training.vision_tower: blocks keep nothing; a merger with a graph keeps a copy of its input."""
    state = (PATCHES, v.hidden, width, False)
    block = record(lambda _, x, delta: vision.fast_block(x, delta, v), state, state)
    return Tower(
        rotary=times(PATCHES, op.FLOAT * (v.hidden // v.heads)),
        locals=numbers,
        patches=record(lambda tape: vision.fast_patches(tape, v, width)),
        blocks=(block,) * v.depth,
        # Of a new size: positions of four corners in float32, and weighted; then they stay.
        tables=ZERO if v.kind == "qwen2_5" else plus(numbers, form(frame=2 * 4 * op.FLOAT * v.hidden)),
        **common,  # type: ignore[arg-type]
    )


def _pixels(tape: Tape, v: VisionShape, width: int, trains: str) -> Value:
    """The tower's input; what is not kept for the first weights' gradient counts among the locals."""
    held = tape.new(PATCHES if trains == "full" else ZERO, v.patch_values, width)
    return Value(held.storage, PATCHES, v.patch_values, width)


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


def _adapts_qkv(tuned: Tuned) -> bool:
    return any(name.endswith(("q_proj", "k_proj", "v_proj")) for name in tuned.adapted)


@functools.lru_cache(maxsize=256)
def _layer(
    shape: Shape, attends: bool, tuned: Tuned, width: int, wants: bool, way: Way, rows: Form | None
) -> Piece:  # fmt: skip
    """`rows`: of the last layer, those whose second half is computed; None: all."""
    number = next(n for n in range(shape.layers) if (n in shape.attending) == attends)
    linears, given = shape.decoder(number), (TOKENS, shape.hidden, width, wants)
    if not way.fused:
        return record(lambda _, x: decoder.decoder_layer(x, shape, linears, tuned, way.packing), given)
    sizes = fused.sizes_of(shape, linears, tuned, width, half=way.half, together=way.together)
    return record(lambda _, x: fused.fused_layer(x, sizes, shape.heads, way.packing, rows), given)


def _norm(
    shape: Shape, tuned: Tuned, width: int, wants: bool, way: Way, few: Form | None, read: Form
) -> Piece:  # fmt: skip
    """The last norm, and the rows that the head reads of it: the fused functions take them first."""
    given = (few or TOKENS, shape.hidden, width, wants)
    if not way.fused:
        return record(lambda _, x: op.take(decoder.last_hidden(x, shape, tuned), read), given)
    return record(lambda _, x: rms_norm(x if few else op.take(x, read), tuned), given)


@functools.lru_cache(maxsize=64)
def _block(v: VisionShape, tuned: Tuned, width: int, wants: bool) -> Piece:
    return record(lambda _, x: vision.vision_block(x, v, tuned), (PATCHES, v.hidden, width, wants))


def _batch(shape: Shape, width: int, sees: bool) -> Form:
    """A MicroBatch (ids, positions, rows of keys, labels, scores, last, group, document) and rotary angles.

    Pictures come as bytes, once for both frames of a patch.
    """
    total = form(tokens=4 * op.LONG, keys=op.LONG, documents=3 * op.LONG + 2 * op.FLOAT, answers=2 * op.LONG)
    total = plus(total, times(TOKENS, 2 * shape.turning * width))
    if sees and shape.vision:
        total = plus(total, form(patches=shape.vision.patch_values // 2, visual=2 * op.LONG, tokens=op.BOOL))
    return total


def _head(shape: Shape, tune: TuneConfig, task: str, width: int, wants: bool) -> Piece:
    trains = tune.head == "full" or (shape.tied and tune.language == "full")

    def build(_: Tape, x: Value) -> Value:
        if task == "sft":
            return op.answer_losses(x, shape.vocab, trains=trains)
        return op.linear(op.cast(x, op.FLOAT), 1, trains=False)

    return record(build, (_read(task), shape.hidden, width, wants))


def _read(task: str) -> Form:
    """Tokens whose last hidden states the task's head reads."""
    return ANSWERS if task == "sft" else DOCUMENTS
