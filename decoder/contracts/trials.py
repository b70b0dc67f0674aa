"""Rounds of a trial: what each side made of its block of steps, on the trials topic.

A worker that compares sides lets them decide in turn, in an order drawn by lot, each for a block of
steps that is as long as its requests take to commit some tokens each: the same stretch of text for
all. When the last block of a round is over, the round is one record. A step is its side's from the
choice to what came of it. The beginning of a block is left out of all its numbers but ``late_us``,
and so is what its last step committed beyond its end: tokens and times may be parts of a step's.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.errors import ContractError

CONTRACT: Final = "hvd.trials.v2"
MAX_BLOCKS: Final = 16
MAX_GROUPS: Final = 64

PLAIN: Final = "plain"
SUFFIX: Final = "suffix"
MODEL: Final = "model"
"""Who decides in a block, beside the policies of a role: nobody (no speculation), stock suffix
decoding, and the model draft in every cycle. Readers keep sides that they do not know."""
HOLDOUT_SIDES: Final = (PLAIN, SUFFIX, MODEL, FIRST)
"""Those that a worker may compare itself with for ever."""
OWN_DRAFTS: Final = frozenset(("", CHAMPION, TRIAL, FIRST))
"""Who decides on cache drafts within the worker's own limits; "" is nobody of a trial. A stock
server's limits are others, so that features and labels mean something else."""

Count = Annotated[int, Field(ge=0, le=2**53)]
Tokens = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Micros = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]  # eleven days
Name = Annotated[str, StringConstraints(max_length=64)]


class Group(BaseModel):
    """What a block made for one tenant and workload, both as they stand in draft events.

    A step's time belongs to its requests together, to each as much: ``cost_us`` is a group's part.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    tenant: Name = ""
    workload: Name = ""
    tokens: Tokens
    cost_us: Micros


class Block(BaseModel):
    """One side's steps in a round. Times in microseconds.

    ``us`` is wall time, ``cost_us`` the same steps at the costs in force, by which a pause of the
    machine is nobody's fault. Both hold ``late_us``, of a side that may draft: of what it took in
    the round to read text that the drafter had left unread, the part of this block's text.
    ``foretold`` are the tokens that went on as the same three tokens had when they last came in the
    request's own text: a fact of the text that fell to the block, whoever decided.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    side: Name
    version: Count = 0
    publication: Count = 0
    steps: Count
    requests: Count  # advanced by these steps, each once
    tokens: Tokens  # committed
    us: Micros
    cost_us: Micros
    late_us: Micros = 0.0
    foretold: Tokens = 0.0
    groups: Annotated[tuple[Group, ...], Field(max_length=MAX_GROUPS, strict=False)] = ()


class Round(BaseModel):
    """One record: a block of each side that took part, in the order they were played."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    contract: Literal["hvd.trials.v2"] = CONTRACT
    scope: Annotated[str, StringConstraints(pattern=r"^[a-z0-9._-]{1,64}$")]
    worker: Annotated[str, StringConstraints(max_length=256)]
    life: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,32}$")]
    number: Count  # of the round within its worker's life, from 0
    time: Annotated[float, Field(ge=0, le=2.0**36)]  # seconds since the epoch, at its end
    unit: Count | None = None  # of rounds one after another that had requests in common
    blocks: Annotated[tuple[Block, ...], Field(min_length=1, max_length=MAX_BLOCKS, strict=False)]

    def block(self, side: str) -> Block | None:
        """The block of ``side``, if it took part."""
        return next((block for block in self.blocks if block.side == side), None)


def decode_round(value: bytes) -> Round:
    """Read a record of the trials topic.

    Raises:
        ContractError: not a round of this contract, or a number out of its range.
    """
    try:
        return Round.model_validate_json(value)
    except (ValidationError, RecursionError) as error:
        raise ContractError(f"trial round refused: {error}".splitlines()[0]) from error
