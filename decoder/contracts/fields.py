"""The fields of a draft event, and everything that follows from them: the one list there is.

The dtype of a row in memory, the range check, the columns on the topic, their JSON Schema and the
table in ``docs/reference/topics.md`` are made of :data:`FIELDS`. A new field is one entry here.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np

from decoder.contracts.bundle import MAX_DRAFT
from decoder.contracts.features import NUM_FEATURES

Scope = Literal["cycle", "step", "request"]
"""What has one value of a field: each cycle, all cycles of a step, or all of a request."""
Kind = Literal["integer", "number", "string"]
"""The type of a value on the topic, in JSON Schema's words."""

NAME_LENGTH: Final = 64
"""Characters of a string."""
_COUNT: Final = (0, 2**31 - 1)
_LARGE: Final = (0, 2**53)
_TOKENS: Final = (0, MAX_DRAFT)
_EXPECTED: Final = (0.0, 2.0 * MAX_DRAFT)
_MICROSECONDS: Final = (0.0, 1e12)
_TEXT: Final = (0, NAME_LENGTH)
_INTERNED: Final = "interned"


class Field(NamedTuple):
    """One field, which is a column on the topic.

    ``stored`` is the dtype in memory. An ``interned`` string is an int32 there, the number of a
    word of the ring; any other string is a pseudonym in ASCII. ``limits`` are the least and
    greatest value, or length of a string, both allowed: one absurd number, believed, would spoil
    whatever is learned or added up from the rest. A ``nullable`` field is -1 in memory where it is
    null on the topic. ``words`` are all that a string may be, where that is known. An ``optional``
    column is absent from records of earlier releases, which mean this value.
    """

    name: str
    scope: Scope
    stored: str
    limits: tuple[float, float]
    unit: str
    meaning: str
    nullable: bool = False
    words: tuple[str, ...] = ()
    optional: float | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """In memory."""
        return np.dtype("i4" if self.interned else self.stored)

    @property
    def interned(self) -> bool:
        """Whether memory holds the number of a word."""
        return self.stored == _INTERNED

    @property
    def kind(self) -> Kind:
        """On the topic."""
        if self.interned or self.dtype.kind == "S":
            return "string"
        return "integer" if self.dtype.kind == "i" else "number"


FIELDS: Final = (
    Field("number", "cycle", "i8", _LARGE, "", "of the event within its life; one passed over was "
          "dropped, refused, or is still to come"),
    Field("time", "step", "f8", (0.0, 2.0**36), "s", "since the epoch, when the choice was made"),
    Field("request", "request", "S24", _TEXT, "",
          "pseudonym, the same for all cycles of a request"),
    Field("tenant", "request", "S24", _TEXT, "", "pseudonym, or empty"),
    Field("session", "request", "S24", _TEXT, "", "pseudonym, or empty"),
    Field("choice", "request", "i4", _COUNT, "",
          "which of the choices (`n` > 1) of one client request"),
    Field("workload", "request", "S32", _TEXT, "",
          "the client's name for this kind of traffic, a pseudonym, or empty"),
    Field("cycle", "cycle", "i4", _COUNT, "", "index of the cycle within its request"),
    Field("position", "cycle", "i4", _COUNT, "tokens", "output tokens committed before it"),
    Field("policy_version", "step", "i4", _COUNT, "",
          "version of the policy in force, in the registry; 0 has learned nothing"),
    Field("publication", "step", "i8", _LARGE, "",
          "number of its publication for this scope and role; 0 came with the worker"),
    Field("role", "step", _INTERNED, _TEXT, "",
          "of the policy in force: `champion`, `trial`, `first`"),
    Field("side", "step", _INTERNED, _TEXT, "", "of a trial; empty outside"),
    Field("parameter", "step", "f8", (-1e12, 1e12), "", "the decision parameter in force"),
    Field("parameter_name", "step", _INTERNED, _TEXT, "", "what it is: `threshold` (tokens), or "
          "`rate` (tokens a request commits in the time of a step without drafts, the worker's own "
          "of late)"),
    Field("predicted", "cycle", "f8", _EXPECTED, "tokens",
          "expected accepted length of the cache draft"),
    Field("predicted_model", "cycle", "f8", _EXPECTED, "tokens",
          "expected accepted length of the model draft"),
    Field("arm", "cycle", _INTERNED, _TEXT, "",
          "what the cycle verified: `cache`, `model`, `none`; `graft` in records of version 0.2.0"),
    Field("draft_len", "cycle", "i4", _TOKENS, "tokens",
          "what the cache proposed; 0 where it proposed nothing"),
    Field("drafted_len", "cycle", "i4", _TOKENS, "tokens",
          "draft of the chosen arm, as it was really made"),
    Field("verified_len", "cycle", "i4", _TOKENS, "tokens", "how much of that was verified"),
    Field("accepted", "cycle", "i4", _TOKENS, "tokens", "accepted length of the cache draft: its "
          "longest common prefix with what was committed"),
    Field("label", "cycle", _INTERNED, _TEXT, "", "`verified`, `hindsight` when the draft was not, "
          "or not wholly, verified, empty without a cache draft",
          words=("verified", "hindsight", "")),
    Field("censored", "cycle", _INTERNED, _TEXT, "",
          "empty, or why `accepted` is only a lower bound: `length`, `stop`, `abort`"),
    Field("model_accepted", "cycle", "i4", _TOKENS, "tokens",
          "accepted length of the model draft where that was verified", nullable=True),
    Field("batch_size", "step", "i4", (1, 2**20), "requests", "in the step"),
    Field("step_tokens", "step", "i4", _COUNT, "tokens",
          "that the verifying step ran through the target, prefill included"),
    Field("draft_us", "step", "f8", _MICROSECONDS, "us", "to propose and decide, the whole step"),
    Field("step_us", "step", "f8", _MICROSECONDS, "us", "from this decision to the next"),
    Field("share", "cycle", "f8", (0.0, 1.0), "", "chance that its request was told of at all: "
          "below 1 where the worker made more events than `HVD_WORKER_EVENTS_PER_S` and shed whole "
          "requests; weigh by `1 / share`. Absent from records of before", optional=1.0),
)  # fmt: skip

COLUMNS: Final = tuple(field.name for field in FIELDS)
"""Columns beside the features, in their order on the topic."""
NUMBERS: Final = tuple(field for field in FIELDS if field.kind != "string")
STRINGS: Final = tuple(field for field in FIELDS if field.kind == "string")
LIMITS: Final = {field.name: field.limits for field in NUMBERS}
"""Least and greatest value of each number."""


def dtype_of(scope: Scope) -> np.dtype[Any]:
    """Of the fields that have one value for each ``scope``: packed, whole words of 8 bytes first,
    so that all are aligned."""
    fields = [field for field in FIELDS if field.scope == scope]
    fields.sort(key=lambda field: field.dtype.itemsize % 8)
    return np.dtype([(field.name, field.dtype) for field in fields])


CYCLE: Final = dtype_of("cycle")
STEP: Final = dtype_of("step")
REQUEST: Final = dtype_of("request")
ROW: Final = np.dtype(
    [*CYCLE.descr, *STEP.descr, *REQUEST.descr, ("features", np.float32, (NUM_FEATURES,))]
)
"""An event in memory. Its features are the vector of :data:`decoder.contracts.features.FEATURES`,
of no meaning where ``draft_len`` is 0."""
