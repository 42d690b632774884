"""What a part of a step takes in each of its passes, and which passes a tuning choice has."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.spec import TuneConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """FLOPs, bytes or seconds of one part in each pass."""

    forward: float = 0.0
    backward: float = 0.0  # what the gradients need
    again: float = 0.0  # forward work that is done again in the backward pass

    @property
    def needed(self) -> float:
        """Without what is only computed again."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """All that is computed."""
        return self.needed + self.again

    def times(self, factor: float) -> Passes:
        """Each pass as much larger."""
        return Passes(forward=self.forward * factor, backward=self.backward * factor, again=self.again * factor)

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            again=self.again + other.again,
        )


def reaches_language(tune: TuneConfig) -> bool:
    """Whether gradients run through the language model: something in it or in front of it trains."""
    return any(part != "frozen" for part in (tune.language, tune.vision, tune.projector))


def reaches_input(tune: TuneConfig, *, sees: bool) -> bool:
    """Whether they run on through the inputs of its first layer."""
    return tune.language == "full" or (sees and (tune.vision != "frozen" or tune.projector != "frozen"))
