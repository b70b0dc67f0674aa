"""One policy from some generations of many kinds, which has to do for kinds it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import ANY_SCOPE, FIRST, PROBES, Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.engines.reference.method import Method
from decoder.policy.estimate import PAPER_THRESHOLD
from decoder.settings import WHOLE_FACTOR, WorkerSettings
from learner import train
from learner.rows import Rows, hash_id, joined
from pipelines.first.sets import TraceSet
from pipelines.replay.engine import hybrid, simulate
from pipelines.replay.model_arm import drawn_acceptance
from pipelines.replay.split import some_sessions
from pipelines.replay.survival import LEAST, teachers
from pipelines.replay.traces import Trace

GENERATIONS: Final = 100
"""Taken of each set, in whole sessions: four times as many brought nothing."""
ACCEPTS: Final = (0.0, 3.5)
"""Mean accepted lengths of the drafters that recordings are decoded with, where none was recorded.
A policy for any drafter must not learn one drafter's mean. Each session has its own, so that what
tells of it is the running accepted length, which is a feature, and nothing else."""
EPOCHS: Final = 10
"""A third of a refit's: later ones teach what is peculiar to these sets, and make a policy decode
no other any faster."""
LONGER: Final = 2.0
"""Times the length of a worker's cache drafts that those have which it learns from. A policy that
has seen what becomes of longer ones cuts better, by a per cent at what a processor's steps cost."""
SEED: Final = 42


@dataclass(frozen=True)
class Sample:
    """What was taken of a set, and the labelled drafts of decoding it."""

    name: str
    licences: tuple[str, ...]
    traces: list[Trace]
    rows: Rows


def with_drafter(
    traces: Sequence[Trace], accepts: tuple[float, float], most: int, seed: int
) -> list[Trace]:
    """``traces`` with a model arm where none was recorded.

    Args:
        accepts: between these lies the mean accepted length, drawn for each session.
        most: tokens of a model draft.
    """
    drafted = []
    for number, trace in enumerate(traces):
        if trace.model_accepted is None:
            session = [seed, hash_id(trace.session)]
            mean = float(np.random.default_rng(session).uniform(*accepts))
            rng = np.random.default_rng([*session, number])
            accepted = drawn_acceptance(mean, most, len(trace.output), rng)
            trace = replace(trace, model_accepted=accepted)  # noqa: PLW2901
        drafted.append(trace)
    return drafted


def rows_of(
    traces: Sequence[Trace],
    token_classes: FloatArray,
    settings: WorkerSettings,
    accepts: tuple[float, float] = ACCEPTS,
    by: Sequence[Method] = (),
) -> Rows:
    """The labelled drafts of ``traces``, decoded from an empty cache by each of ``by``, or by the
    teachers that survival policies learn from."""
    parts = []
    for seed, teacher in enumerate(by or teachers(), start=SEED):
        drafted = with_drafter(traces, accepts, settings.model_draft_tokens, seed)
        parts.append(simulate(drafted, [], teacher, token_classes, settings)[1].rows)
    return joined(parts)


def sample(
    found: TraceSet, generations: int, token_classes: FloatArray, settings: WorkerSettings
) -> Sample:
    """About ``generations`` of a set, in whole sessions chosen by hash, and their drafts, which are
    ``LONGER`` than those that a worker with ``settings`` proposes."""
    traces = some_sessions(found.traces, generations)
    factor = LONGER * settings.suffix_max_factor
    longer = settings.model_copy(update={"suffix_max_factor": factor})
    return Sample(found.name, found.licences, traces, rows_of(traces, token_classes, longer))


def fit(rows: Rows, epochs: int = EPOCHS) -> Policy:
    """A survival policy for any scope.

    Raises:
        TraceError: too few labelled drafts.
    """
    if len(rows) < LEAST:
        raise TraceError(f"the recordings give {len(rows)} labelled drafts, {LEAST} are needed.")
    trainer = train.fit(rows, "survival", epochs)
    spread = np.linspace(0, len(rows) - 1, PROBES).astype(np.int64)  # over texts of every kind
    policy = train.export(trainer, ANY_SCOPE, PAPER_THRESHOLD, rows.features[spread])
    seen = rows.model_accepted[np.isfinite(rows.model_accepted)]
    return replace(policy, role=FIRST, model_payoff=float(seen.mean()) if len(seen) else 0.0)


def counting() -> Method:
    """What a first policy is held to, with the drafts that suit it best."""
    return replace(teachers()[1], draft_factor=WHOLE_FACTOR)


def without(samples: Sequence[Sample], name: str) -> Policy:
    """The policy that ``samples``, at least two, make if the set called ``name`` is left out.

    Raises:
        TraceError: too few labelled drafts are left.
    """
    return fit(joined([s.rows for s in samples if s.name != name]))


def over_counting(
    one: Sample, policy: Policy, token_classes: FloatArray, settings: WorkerSettings
) -> float:
    """The rate at which ``policy`` decodes a sample, over that of counting; nominal costs."""
    asked = with_drafter(one.traces, ACCEPTS, settings.model_draft_tokens, SEED)
    rates = [
        simulate(asked, [], by, token_classes, settings)[0].tally().rate
        for by in (hybrid("first", policy), counting())
    ]
    return rates[0] / rates[1]


def card(samples: Sequence[Sample], tokenizer: str, scores: dict[str, float]) -> dict[str, Any]:
    """What a first policy was made of, for its provenance.

    Args:
        tokenizer: its name.
        scores: of each set's sample, by a policy made without that set.
    """
    return {
        "made_by": "hvd bootstrap: recorded generations of many kinds, decoded cycle by cycle",
        "date": date.today().isoformat(),
        "tokenizer": tokenizer,
        "seed": SEED,
        "model_draft_accepts": list(ACCEPTS),
        "sets": [
            {
                "name": s.name,
                "licence": ", ".join(s.licences) or "not stated",
                "sessions": len({t.session for t in s.traces}),
                "generations": len(s.traces),
                "drafts": len(s.rows),
                "over_counting_left_out": round(scores[s.name], 4),
            }
            for s in samples
        ],
        "drafts_trained_on": sum(len(s.rows) for s in samples),
        "scores": {
            "over_counting_left_out": round(float(np.mean(list(scores.values()))), 4),
            "over_counting_left_out_least": round(min(scores.values()), 4),
        },
    }
