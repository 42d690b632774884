"""Linear layers of the fused functions for a `tape` (launcher.training.fused.projections)."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.kernels import INLINE_RANKS, padded_rank, row_stride
from launcher.planning.tape.recorder import Form, Tape, Value, form

ONE = form(one=1)
Held = list[Value | None]  # what lives until the function that has it returns


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """Linear layers of the same input (launcher.training.fused.projections.Joined)."""

    inner: int
    outers: tuple[int, ...]
    ranks: tuple[int, ...]  # of each one's adapter, 0 without
    trains: bool
    biases: bool
    four_bit: bool
    together: bool  # frozen weights lie with their adapters, so that one product takes both
    width: int  # bytes of a number

    @property
    def outer(self) -> int:
        """Width of all results side by side."""
        return sum(self.outers)

    @property
    def rank(self) -> int:
        """Ranks of all adapters, padded."""
        return padded_rank(sum(self.ranks))

    @property
    def spare(self) -> int:
        """Columns that a product with adapters needs beside its input's, and beside its result's on the way back."""
        return self.rank if self.together else 0

    def weights(self, tape: Tape, *sizes: int) -> Held:
        """Temporary tensors of so many numbers."""
        return [tape.new(ONE, size, self.width) for size in sizes]

    def forward(self, tape: Tape, rows: Form, *, wide: bool) -> tuple[Value, Held, Held]:
        """(the result, B where it is still to be added, the rows' product with A).

        `wide`: the input has spare columns; without, it is copied into such for one product to add what adapters do.
        """
        h = self._product(tape, rows, self._a(tape)) if self.rank else []
        out = tape.new(rows, row_stride(self.outer, self.spare), self.width)
        for outer in self.outers if self.four_bit else ():
            self.weights(tape, self.inner * outer)  # in 16 bits, one by one
        if self.spare and not wide:
            tape.new(rows, row_stride(self.inner, self.spare), self.width)
        b = self._b(tape)
        if self.rank > INLINE_RANKS:
            b.clear()
        return out, b, h

    def low(self, tape: Tape) -> Held:
        """B, where a pass of the backward pass adds what `forward` left to be added."""
        return self._b(tape) if self.rank <= INLINE_RANKS else []

    def slope(self, tape: Tape, rows: Form) -> Held:
        """The rows' gradient times B."""
        return self._product(tape, rows, self._b(tape)) if self.rank else []

    def backward_input(self, tape: Tape, rows: Form) -> Value:
        """Gradient of the input."""
        first, *others = self.outers
        plain = self.weights(tape, self.inner * first) if self.four_bit else []
        dx = tape.new(rows, self.inner, self.width)
        plain.clear()
        for outer in others if self.four_bit else ():
            self.weights(tape, self.inner * outer)
        self._a(tape)
        return dx

    def gradients(self, tape: Tape, da: Held) -> Held:
        """Of all that trains, alive until the backward function returns; those of A are parts of `da`."""
        db = self.weights(tape, self.outer * self.rank) if self.rank else []
        found = list(da)
        for outer, rank in zip(self.outers, self.ranks, strict=True):
            if self.trains:
                found += self.weights(tape, self.inner * outer, *([outer] if self.biases else []))
            if rank:
                found += self.weights(tape, outer * rank)
        db.clear()
        return found

    def _product(self, tape: Tape, rows: Form, factor: Held) -> Held:
        """A thin matrix, whose factor goes when it is there."""
        thin: Held = [tape.new(rows, self.rank, self.width)]
        factor.clear()
        return thin

    def _a(self, tape: Tape) -> Held:
        """All A one below another, and zeros beside them for a moment; nothing where they lie so."""
        if not self.rank or self.together:
            return []
        missing = self.rank - sum(self.ranks)
        zeros = self.weights(tape, missing * self.inner) if missing else []
        a = self.weights(tape, self.rank * self.inner)
        zeros.clear()
        return a

    def _b(self, tape: Tape) -> Held:
        """All B along a diagonal; nothing where they lie so."""
        return self.weights(tape, self.outer * self.rank) if self.rank and not self.together else []
