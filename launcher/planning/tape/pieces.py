"""A stretch of a network, recorded once: what it keeps, and the moments that can be its fullest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.planning.tape.recorder import ZERO, Form, Tape, Value, fullest, plus, times


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of the network, what it is given included: bytes it keeps, and the moments that can be its fullest."""

    kept: Form = ZERO
    forward: tuple[Form, ...] = (ZERO,)
    backward: tuple[Form, ...] = (ZERO,)
    # When it is recomputed: what it keeps (its input), its first forward pass, and the second with the backward pass.
    kept_input: Form = ZERO
    forward_only: tuple[Form, ...] = (ZERO,)
    again: tuple[Form, ...] = (ZERO,)


Given = tuple[Form, int, int, bool]  # an input: rows, columns, width, whether its gradient is wanted
Build = Callable[..., Value]


def record(build: Build, *inputs: Given) -> Piece:
    """The moments of `build`, a function of a tape and of tensors."""
    forward, out, tape = _forward(build, inputs)
    edge, like = out.edge, (out.rows, out.columns, out.width)
    del out
    if edge is None:
        return Piece(forward=forward, forward_only=forward)
    kept, tape.moments = tape.alive, []
    tape.backward([(edge, tape.new(*like))])
    return Piece(
        kept=kept,
        forward=forward,
        backward=fullest(tape.moments),
        kept_input=times(inputs[0][0], inputs[0][1] * inputs[0][2]) if inputs else ZERO,
        forward_only=_forward(build, inputs, saving=False)[0],
        again=_again(build, inputs),
    )


def _forward(build: Build, inputs: tuple[Given, ...], *, saving: bool = True) -> tuple[tuple[Form, ...], Value, Tape]:
    tape = Tape(saving=saving)
    given = _given(tape, inputs)
    out = build(tape, *given)
    return fullest([tape.alive, *tape.moments]), out, tape


def _given(tape: Tape, inputs: tuple[Given, ...]) -> list[Value]:
    return [(tape.leaf if needs else tape.new)(rows, columns, width) for rows, columns, width, needs in inputs]


def _again(build: Build, inputs: tuple[Given, ...]) -> tuple[Form, ...]:
    """Moments of a piece that runs a second time once its gradient has come; its input is held to the end."""
    tape = Tape()
    given = _given(tape, inputs)
    out = build(tape, *given)
    assert out.edge is not None
    edge, like = out.edge, (out.rows, out.columns, out.width)
    # The second forward pass stops as soon as the last tensor is saved (torch.utils.checkpoint, early stop), and
    # begins when the first is needed: beside the gradients that are there by then.
    again, tape.moments = tape.moments[: tape.last_saved], []
    del out
    saved = tape.alive
    tape.backward([(edge, tape.new(*like))])
    gradients = plus(tape.first_use or saved, times(saved, -1))
    return fullest([*tape.moments, *(plus(moment, gradients) for moment in again)])
