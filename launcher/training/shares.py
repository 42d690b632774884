"""One rank's part of a batch: which documents, their tokens, and their media where they are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from launcher.training.batching import Unit, answer_tokens
from launcher.training.encoding import Encoded
from launcher.training.images import MediaError
from launcher.training.patches import Patches
from launcher.training.pieces import MediaKey, MediaSlot
from launcher.training.rows import Row

Media = dict[MediaKey, Future[Patches]]
Bad = tuple[MediaError, Row]


@dataclass(frozen=True, slots=True)
class Share:
    """What each micro-batch of a rank computes; counts are of the whole share."""

    encoded: Mapping[int, Encoded]  # by place in the batch
    batches: tuple[tuple[Unit, ...], ...]
    media: tuple[Media, ...] = ()  # of each micro-batch, where they are decoded already

    @property
    def documents(self) -> int:
        """Documents, or chats."""
        return sum(len(unit.documents) for units in self.batches for unit in units)

    @property
    def groups(self) -> int:
        """Groups of which there is any document."""
        return len({unit.index for units in self.batches for unit in units})

    @property
    def whole_groups(self) -> float:
        """Groups, a part of one as a part."""
        units = [unit for units in self.batches for unit in units]
        return sum(len(unit.documents) / len(self.encoded[unit.index].prompts) for unit in units)

    @property
    def answers(self) -> int:
        """Tokens whose prediction is in the loss."""
        return sum(_answers(self.encoded[unit.index], unit) for units in self.batches for unit in units)

    @property
    def tokens(self) -> int:
        """Packed tokens; a micro-batch without a unit holds one."""
        return sum(sum(_tokens(self.encoded[unit.index], unit) for unit in units) or 1 for units in self.batches)

    def slots(self, units: Sequence[Unit]) -> list[MediaSlot]:
        """The media of some of its units, each once."""
        every = [s for unit in units for d in unit.documents for s in self.encoded[unit.index].prompts[d].media]
        return list({slot.key: slot for slot in every}.values())

    def readable(self, units: Sequence[Unit], media: Media) -> tuple[tuple[Unit, ...], tuple[Bad, ...]]:
        """Units whose media could be decoded, and what was wrong with the first medium of each other one.

        Waits for them; those that nobody began to decode are not looked at.
        """
        good, bad = list[Unit](), list[Bad]()
        for unit in units:
            try:
                for slot in self.slots([unit]):
                    if slot.key in media:
                        media[slot.key].result()
                good.append(unit)
            except MediaError as error:
                bad.append((error, self.encoded[unit.index].row))
        return tuple(good), tuple(bad)


def _tokens(group: Encoded, unit: Unit) -> int:
    return group.prefix + sum(len(group.prompts[d]) - group.prefix for d in unit.documents)


def _answers(group: Encoded, unit: Unit) -> int:
    prompts = [group.prompts[d] for d in unit.documents]
    own = sum(len(answer_tokens(prompt, group.prefix, len(prompt))) for prompt in prompts)
    return own + len(answer_tokens(prompts[0], 0, group.prefix))
