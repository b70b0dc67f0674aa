"""What one step drafts: decided once, and done alike by whoever runs the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step drafts, by rows of the batch.

    ``given`` are tokens to propose as they are; in a row without, ``rooms`` says how many tokens of
    the model's draft to propose at most. The model drafter makes ``k`` tokens; with ``catch_up`` it
    reads what was set aside even if it makes none. Requests that begin with the
    step are read by the drafter if it ``reads``.
    """

    given: tuple[tuple[int, ...], ...]
    rooms: tuple[int, ...]
    k: int = 0
    catch_up: bool = False
    reads: bool = True

    @classmethod
    def nothing(cls, rows: int) -> Plan:
        """No drafts."""
        return cls(((),) * rows, (0,) * rows)

    def proposals(self, made: Sequence[Sequence[int]]) -> list[list[int]]:
        """Each row's draft; ``made`` are the model's, in rows, some or all of which may lack."""
        rows = [*made, *((),) * (len(self.given) - len(made))]
        return [
            list(given) or list(model[:room])
            for given, room, model in zip(self.given, self.rooms, rows, strict=False)
        ]
