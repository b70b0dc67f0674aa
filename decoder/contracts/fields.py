"""The fields of a draft event: the single definition.

The dtype of a row in memory, the range check, the columns on the topic, their JSON Schema and the
table in ``docs/reference/topics.md`` derive from :data:`FIELDS`. A new field is one entry here.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np

from decoder.contracts.bundle import MAX_DRAFT
from decoder.contracts.features import NUM_FEATURES

Scope = Literal["cycle", "step", "request"]
"""Granularity of a field: one value for each cycle, step or request."""
Kind = Literal["integer", "number", "string"]
"""The type of a value on the topic, in JSON Schema's words."""

NAME_LENGTH: Final = 64  # most characters of a string
_COUNT: Final = (0, 2**31 - 1)
_LARGE: Final = (0, 2**53)
_TOKENS: Final = (0, MAX_DRAFT)
_EXPECTED: Final = (0.0, 2.0 * MAX_DRAFT)
_MICROSECONDS: Final = (0.0, 1e12)
_TEXT: Final = (0, NAME_LENGTH)
_INTERNED: Final = "interned"


class Field(NamedTuple):
    """One field, which is a column on the topic.

    ``stored`` is the dtype in memory. An ``interned`` string is an int32 there, its id in the ring;
    any other string is a pseudonym in ASCII. ``limits`` are the least and greatest value, or length
    of a string, inclusive: a single absurd number would spoil training and sums. A ``nullable``
    field is -1 in memory where it is null on the topic. ``words`` are the only values of a string,
    where they are known. An ``optional`` column is absent from records of earlier releases, where
    it stands for this value.
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
        """Dtype in memory."""
        return np.dtype("i4" if self.interned else self.stored)

    @property
    def interned(self) -> bool:
        """Whether memory holds an interned id."""
        return self.stored == _INTERNED

    @property
    def kind(self) -> Kind:
        """Type on the topic."""
        if self.interned or self.dtype.kind == "S":
            return "string"
        return "integer" if self.dtype.kind == "i" else "number"


FIELDS: Final = (
    Field("number", "cycle", "i8", _LARGE, "", "of the event within its life; a missing number was "
          "dropped, refused, or arrives later"),
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
    Field("position", "cycle", "i4", _COUNT, "tokens", "output tokens committed before the cycle"),
    Field("policy_version", "step", "i4", _COUNT, "",
          "version of the serving policy in the registry; 0: not trained"),
    Field("publication", "step", "i8", _LARGE, "",
          "number of its publication for this scope and role; 0: shipped with the worker"),
    Field("role", "step", _INTERNED, _TEXT, "",
          "of the serving policy: `champion`, `trial`, `first`"),
    Field("side", "step", _INTERNED, _TEXT, "", "variant that decided the step; empty outside of "
          "comparisons"),
    Field("round", "step", "i8", _LARGE, "", "number of the round of `hvd.trials.v2` in this life "
          "that the step is in; null outside of comparisons. A cancelled round has a number and no "
          "record. Absent from records of earlier releases", nullable=True, optional=-1.0),
    Field("parameter", "step", "f8", (-1e12, 1e12), "", "the policy's decision parameter"),
    Field("parameter_name", "step", _INTERNED, _TEXT, "", "`threshold` (tokens), or `rate` (tokens "
          "a request commits in the time of a step without drafts, the worker's recent mean)"),
    Field("predicted", "cycle", "f8", _EXPECTED, "tokens",
          "expected accepted length of the cache draft"),
    Field("predicted_model", "cycle", "f8", _EXPECTED, "tokens",
          "expected accepted length of the model draft"),
    Field("arm", "cycle", _INTERNED, _TEXT, "",
          "arm that was verified: `cache`, `model`, `none`; `graft` in records of version 0.2.0"),
    Field("draft_len", "cycle", "i4", _TOKENS, "tokens",
          "length of the cache draft; 0 where there was none"),
    Field("drafted_len", "cycle", "i4", _TOKENS, "tokens",
          "length of the chosen arm's draft, as it was made"),
    Field("verified_len", "cycle", "i4", _TOKENS, "tokens", "verified part of that draft"),
    Field("accepted", "cycle", "i4", _TOKENS, "tokens", "accepted length of the cache draft: its "
          "longest common prefix with the committed tokens"),
    Field("label", "cycle", _INTERNED, _TEXT, "", "`verified`; `hindsight` where the draft was not "
          "verified, or only in part; empty without a cache draft",
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
    Field("share", "cycle", "f8", (0.0, 1.0), "", "probability with which its request was sampled: "
          "below 1 where the worker made more events than `HVD_WORKER_EVENTS_PER_S`; weight by "
          "`1 / share`. Absent from records of earlier releases", optional=1.0),
)  # fmt: skip

COLUMNS: Final = tuple(field.name for field in FIELDS)
"""Columns beside the features, in their order on the topic."""
NUMBERS: Final = tuple(field for field in FIELDS if field.kind != "string")
STRINGS: Final = tuple(field for field in FIELDS if field.kind == "string")
LIMITS: Final = {field.name: field.limits for field in NUMBERS}
"""Least and greatest value of each number."""


def dtype_of(scope: Scope) -> np.dtype[Any]:
    """Dtype of the fields of a ``scope``: packed, multiples of 8 bytes first, so all are
    aligned."""
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
undefined where ``draft_len`` is 0."""
