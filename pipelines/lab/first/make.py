"""Trains one policy on generations of many kinds, for kinds it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import ANY_SCOPE, FIRST, PROBES, Kind, Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.settings import WHOLE_FACTOR
from learner.training.rows import Rows, hash_id, joined
from pipelines.lab.drift.changes import filled_in, misleading
from pipelines.lab.replay.study import CONTEXT, behaviour_policies, learned, with_longer_drafts
from pipelines.lab.replay.traces import fraction, read, some_sessions
from pipelines.replay.engine import Simulator, Trace, drawn_acceptance
from pipelines.replay.method import Method
from pipelines.reports import Step

ALLOWED: Final = ("MIT", "Apache-2.0")
"""Allowed values of a row's ``license``. A licence for the code alone ("Apache-2.0 (code), ...
(data)") is another value."""
ACCEPTS: Final = (0.0, 3.5)
"""Range of drafters' mean accepted lengths, where none was recorded. It is drawn by session, so
that the policy must learn it from the running mean, which is a feature."""
EPOCHS: Final = 10  # a third of a refit's; more would fit what is peculiar to these sets
SEED: Final = 42
BREAKS: Final = tuple(n for n in range(3, 25) if n != 6)
"""Tokens after which copies are rejected. Six is held out for ``hvd drift``, which measures an
unseen length."""
FORMS: Final = 8
"""Sessions of a set whose first generation is a form; each is filled in equally often."""


@dataclass(frozen=True)
class Sample:
    """A sample of a set, and the labelled drafts of it and its copies."""

    name: str
    traces: list[Trace]
    rows: Rows


def read_sets(
    paths: Sequence[Path], tokenizer: Any, licences: Sequence[str], step: Step
) -> dict[str, list[Trace]]:
    """The generations of each file, by stem, whose whole session is under one of ``licences``;
    files without any are left out.

    Raises:
        TraceError: a file cannot be read.
    """
    sets = {}
    for path in paths:
        traces = read(path, tokenizer, CONTEXT, partial(step, f"reading {path.name}")).traces
        barred = {t.session for t in traces if t.licence not in licences}
        if allowed := [t for t in traces if t.session not in barred]:
            sets[path.stem] = allowed
    return sets


def with_drafter(
    traces: Sequence[Trace], accepts: tuple[float, float], most: int, seed: int
) -> list[Trace]:
    """``traces`` with a simulated model arm where none was recorded.

    Args:
        accepts: range of the mean accepted length, drawn by session.
        most: most tokens of a model draft.
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


def rows_of(traces: Sequence[Trace], simulator: Simulator) -> Rows:
    """The labelled drafts of ``traces``, decoded from an empty cache by each behaviour policy."""
    parts, length = [], simulator.settings.model_draft_tokens
    for seed, teacher in enumerate(behaviour_policies(), start=SEED):
        parts.append(simulator.decode(with_drafter(traces, ACCEPTS, length, seed), teacher)[1])
    return joined(parts)


def copies_of(
    traces: Sequence[Trace], share: float, token_classes: FloatArray
) -> tuple[list[Trace], list[Trace]]:
    """Copies of about ``share`` of ``traces``, in whole sessions, each rejected at its own length,
    and as many forms that are filled in with other arguments."""
    wanted = share * len(traces)
    broken = [
        misleading(trace, int(draw.choice(BREAKS)), token_classes, draw)
        for trace in some_sessions(traces, wanted)
        for draw in [np.random.default_rng([SEED, hash_id(trace.session)])]
    ]
    forms = {trace.session: trace for trace in reversed(traces)}  # first turns
    draw = np.random.default_rng(SEED)
    names = sorted(forms, key=lambda name: fraction(name, "forms"))[:FORMS]
    filled = filled_in([forms[name] for name in names], round(wanted), token_classes, draw)
    return broken, filled


def samples_of(
    sets: Mapping[str, Sequence[Trace]], generations: int, simulator: Simulator, step: Step,
    copies: float = 0.0,
) -> list[Sample]:  # fmt: skip
    """About ``generations`` of each set, in whole sessions chosen by hash, and their drafts, which
    are longer than a worker's. With ``copies`` that share of :func:`copies_of` is added, decoded
    from a cache of its own, which does not know their outputs.

    Raises:
        TraceError: there are fewer than two sets.
    """
    if len(sets) < 2:
        raise TraceError(
            f"{len(sets)} of the trace files have rows that may be learned from: two are needed, "
            "so that one can be left out. Name more files, or allow more with --licence."
        )
    longer, samples = with_longer_drafts(simulator), []
    for done, (name, traces) in enumerate(sets.items()):
        step(f"decoding {name}", done, len(sets))
        some = some_sessions(traces, generations)
        parts = [rows_of(some, longer)]
        if copies:
            made = copies_of(some, copies, simulator.token_classes)
            parts += [rows_of(each, longer) for each in made if each]
        samples.append(Sample(name, some, joined(parts)))
    return samples


def fit(samples: Sequence[Sample], kind: Kind) -> Policy:
    """A policy for any scope.

    Raises:
        TraceError: there are too few labelled drafts.
    """
    rows = joined([each.rows for each in samples])
    spread = np.linspace(0, len(rows) - 1, PROBES).astype(np.int64)  # from all kinds of text
    probes = rows.features[spread] if len(rows) else rows.features
    return replace(learned(rows, ANY_SCOPE, kind, EPOCHS, probes), role=FIRST)


def over_counting(one: Sample, policy: Policy, simulator: Simulator) -> float:
    """The rate of ``policy`` on a sample over that of counting with its best draft length, at
    nominal costs."""
    drafted = with_drafter(one.traces, ACCEPTS, simulator.settings.model_draft_tokens, SEED)
    by = Method("first", policy), replace(behaviour_policies()[1], draft_factor=WHOLE_FACTOR)
    first, counted = (simulator.decode(drafted, each)[0].rate() for each in by)
    return first / counted


def make(
    samples: Sequence[Sample], tokenizer: str, simulator: Simulator, step: Step,
    kind: Kind = "survival", copies: float = 0.0,
) -> Policy:  # fmt: skip
    """Train a first policy on ``samples``, and score it with each sample left out. Its provenance
    describes the samples.

    Args:
        tokenizer: its name.
        copies: the share that ``samples`` were made with.

    Raises:
        TraceError: there are too few labelled drafts.
    """
    scores = []
    for done, one in enumerate(samples):
        step(f"leaving out {one.name}", done, len(samples))
        others = [other for other in samples if other is not one]
        scores.append(over_counting(one, fit(others, kind), simulator))
    step("training on all", len(samples), len(samples))
    card = {
        "made_by": "hvd bootstrap: recorded generations of many kinds, decoded cycle by cycle",
        "date": date.today().isoformat(),
        "tokenizer": tokenizer,
        "seed": SEED,
        "model_draft_accepts": list(ACCEPTS),
        "copies": copies,
        "sets": [
            {
                "name": s.name,
                "licence": ", ".join(sorted({t.licence for t in s.traces})) or "not stated",
                "sessions": len({t.session for t in s.traces}),
                "generations": len(s.traces),
                "drafts": len(s.rows),
                "over_counting_left_out": round(score, 4),
            }
            for s, score in zip(samples, scores, strict=True)
        ],
        "drafts_trained_on": sum(len(s.rows) for s in samples),
        "scores": {
            "over_counting_left_out": round(float(np.mean(scores)), 4),
            "over_counting_left_out_least": round(min(scores), 4),
        },
    }
    return replace(fit(samples, kind), provenance=card)
