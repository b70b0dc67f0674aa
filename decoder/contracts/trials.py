"""Records of the trials topic: one round of an interleaved comparison.

A worker that compares variants lets each decide one block of steps, in random order. A block lasts
until its requests have committed a fixed mean number of tokens. After the last block, the round is
sent as one record. A block's numbers leave out its warm-up (except in ``late_us``) and the tokens
that its last step committed beyond its end, so tokens and times may be fractions of a step's.
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
"""Variants beside the policies of a role: no speculation, stock suffix decoding, and the model
draft in every cycle. Readers keep variants that they do not know."""
HOLDOUT_VARIANTS: Final = (PLAIN, SUFFIX, MODEL, FIRST)  # variants of the permanent comparison
OWN_DRAFTS: Final = frozenset(("", CHAMPION, TRIAL, FIRST))
"""Variants that see the worker's own cache drafts; "" is outside of a round. A stock server has
other limits, so its features and labels mean something else."""

Count = Annotated[int, Field(ge=0, le=2**53)]
Tokens = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Micros = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]  # eleven days
Name = Annotated[str, StringConstraints(max_length=64)]


class Group(BaseModel):
    """A block's totals for one tenant and workload, both named as in draft events.

    A step's time is divided equally among its requests; ``cost_us`` is the group's share.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    tenant: Name = ""
    workload: Name = ""
    tokens: Tokens
    cost_us: Micros


class Block(BaseModel):
    """One variant's steps in a round. Times in microseconds.

    ``us`` is wall time. ``cost_us`` is the time of the same steps by the cost model, which stalls
    of the machine do not affect. For a variant that uses the model drafter, both include
    ``late_us``: the share of the round's deferred drafter prefill for this block's text.
    ``foretold`` is a covariate, independent of the variant: tokens that equal the token which
    followed the same three tokens when they last occurred in the request's own text.
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
    """One record: a block of each variant that took part, in order."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    contract: Literal["hvd.trials.v2"] = CONTRACT
    scope: Annotated[str, StringConstraints(pattern=r"^[a-z0-9._-]{1,64}$")]
    worker: Annotated[str, StringConstraints(max_length=256)]
    life: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,32}$")]
    number: Count  # of the round since the worker started; those not here were cancelled or lost
    time: Annotated[float, Field(ge=0, le=2.0**36)]  # seconds since the epoch, at its end
    unit: Count | None = None  # the cluster: successive rounds with requests in common
    blocks: Annotated[tuple[Block, ...], Field(min_length=1, max_length=MAX_BLOCKS, strict=False)]

    def block(self, side: str) -> Block | None:
        """The block of variant ``side``, if it took part."""
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
