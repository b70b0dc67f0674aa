"""What a policy's choices come to on recorded drafts, and the threshold that buys most by it.

**Rate.** A text has a given number of tokens, and its copied stretches and its new ones have
theirs. A sum of tokens over a sum of times, taken over the visited states, instead keeps the number
of *cycles*: it credits a cheap arm in a new stretch with the speed of the copied ones, and
underrates an arm that would have needed fewer cycles there. So rates are taken stretch by stretch:
``SEGMENT`` consecutive drafts of a request stand for the tokens committed during them, and the time
to commit those is ``tokens * sum(time) / sum(1 + accepted)`` within the stretch. In simulated texts
of copied and new spans, the threshold chosen this way from always-model logs reached 0.99-1.00 of
the best fixed threshold's rate, the plain ratio 0.91-0.99. A censored draft counts with what was
really committed.

**Threshold** of the kinds that have one. Every threshold that tells the drafts apart is tried,
exactly, in one pass over the sorted predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.features import FloatArray
from decoder.policy.estimate import (
    PAPER_THRESHOLD,
    decide_each,
    estimate,
    estimate_alike,
    predict,
)
from decoder.policy.pricing import part_of
from decoder.policy.rule import CACHE, MODEL, NONE, Choice
from learner.measured import MIN_ARM, Costs, Floats
from learner.rows import UNKNOWN, Rows

MIN_TUNE: Final = 40
"""Drafts before a threshold is fitted to them."""
SEGMENT: Final = 8
"""Drafts of a request taken as one stretch: one alone would charge every unlucky draft as a stretch
without luck, the whole request is the plain ratio again."""
UNSEEN_MARGIN: Final = 1.05
"""To leave a model drafter for drafting nothing, an arm whose cost was read off the line and never
seen, the line must promise this factor; once tried, measured costs decide."""
LEAST_RATE: Final = 0.5
"""Tokens in the time of a plain step: drafting nothing reaches one. A record may say anything."""


@dataclass(frozen=True)
class Stretches:
    """The stretch of each of n drafts, and the tokens committed in each of s stretches."""

    of_draft: NDArray[np.int64]  # [n] in 0..s-1
    tokens: Floats  # [s]

    def needed(self, committed: Floats, time: Floats) -> Floats:
        """Time [s] for each stretch's tokens if its cycles had ``committed`` and ``time`` [n]."""
        s = len(self.tokens)
        per_token = np.bincount(self.of_draft, time, s) / np.bincount(self.of_draft, committed, s)
        return self.tokens * per_token


def stretches(rows: Rows) -> Stretches:
    """Cut the drafts of each request, in order of arrival, into runs of ``SEGMENT``."""
    order = np.argsort(rows.request, kind="stable")
    ranked = rows.request[order]
    begins = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    cuts = begins | ((np.arange(len(order)) - first) % SEGMENT == 0)
    of_draft = np.empty(len(order), np.int64)
    of_draft[order] = np.cumsum(cuts) - 1
    committed = np.ones(len(rows))
    verified = np.minimum(rows.accepted, rows.verified_len)
    committed += np.where(rows.arm == CACHE, verified, 0.0)
    committed += np.where(rows.arm == MODEL, np.nan_to_num(rows.model_accepted), 0.0)
    tokens: Floats = np.bincount(of_draft, committed).astype(np.float64)
    return Stretches(of_draft, tokens)


@dataclass(frozen=True)
class Scan:
    """The best threshold (tokens, exactly representable in float32) and its rate."""

    threshold: float
    rate: float


def scan(
    predicted: FloatArray,
    cache: tuple[Floats, Floats],
    other: tuple[Floats, Floats],
    parts: Stretches,
) -> Scan:
    """Try every threshold that tells the drafts apart.

    Args:
        predicted: float32 [n], at least one.
        cache: committed tokens [n] and time [n] if each draft's cycle takes arm cache.
        other: the same if it takes the other arm.

    Returns:
        The threshold that needs the least time for the tokens of all ``parts``; among equals the
        highest, which verifies least.
    """
    order = np.argsort(-predicted, kind="stable")
    ranked = predicted[order]
    s = len(parts.tokens)
    # Going down the ranks, one draft at a time turns to arm cache and changes its own stretch only.
    grouped = order[np.argsort(parts.of_draft[order], kind="stable")]
    group = parts.of_draft[grouped]
    start = np.searchsorted(group, np.arange(s))  # every stretch holds a draft
    sums = []
    for with_cache, without in zip(cache, other, strict=True):
        gained = np.cumsum((with_cache - without)[grouped])
        before = np.concatenate([[0.0], gained])[start]
        sums.append(np.bincount(parts.of_draft, without, s)[group] + gained - before[group])
    after = parts.tokens[group] * sums[1] / sums[0]
    untouched = parts.needed(*other)
    earlier = np.concatenate([[0.0], after[:-1]])
    earlier[start] = untouched
    change = np.empty(len(order))
    change[grouped] = after - earlier
    times = untouched.sum() + np.concatenate([[0.0], np.cumsum(change[order])])
    rates = parts.tokens.sum() / times
    # k drafts verified is possible only where prediction k differs from prediction k-1.
    possible = np.concatenate([[True], ranked[1:] < ranked[:-1], [True]])
    best = int(np.argmax(np.where(possible, rates, -np.inf)))
    return Scan(_between(ranked, best), float(rates[best]))


def _between(ranked: FloatArray, k: int) -> float:
    """A float32 threshold that exactly the first ``k`` of ``ranked``, descending, reach."""
    if k == 0:
        return float(ranked[0] + np.float32(1.0))
    if k == len(ranked):
        return 0.0  # predictions are never negative
    middle = np.float32((float(ranked[k - 1]) + float(ranked[k])) / 2.0)
    return float(middle if middle > ranked[k] else ranked[k - 1])


def tuned(
    policy: Policy, rows: Rows, measured: Costs | None, champion: Policy
) -> tuple[Policy, str]:
    """``policy`` with the decision parameters of its kind, and a word on where they are from.

    Where costs, drafts or the other arm have not been seen enough, what the champion does stays,
    and the paper's threshold of 6 stands in for a champion that never had one. A survival policy
    has no parameter: a worker decides by the rate that it achieves.
    """
    seen = measured is not None and measured.has_model
    payoff = measured.model_accepted if measured is not None and seen else champion.model_payoff
    if policy.kind == "survival":
        # Arm none competes in every cycle there, so that nothing is switched off for good.
        return replace(policy, use_model=True, model_payoff=payoff), "decides by the live rate"
    kept = replace(
        policy,
        threshold=champion.threshold if champion.kind == policy.kind else PAPER_THRESHOLD,
        use_model=champion.use_model,
        model_payoff=payoff,
    )
    if measured is None or len(rows) < MIN_TUNE:
        return kept, "step costs are not measured yet" if measured is None else "few drafts"
    use_model, note = _use_model(measured, champion)
    kept = replace(kept, use_model=use_model)
    if not measured.has_model and measured.seen[NONE] < MIN_ARM:
        return kept, f"{note}; no other arm observed, threshold kept"
    found = scan(
        predict(policy, rows.features),
        measured.always(rows, CACHE),
        measured.always(rows, MODEL if use_model and measured.has_model else NONE),
        stretches(rows),
    )
    return replace(kept, threshold=found.threshold), note


def speed(policy: Policy, rows: Rows, costs: Costs) -> float:
    """Tokens per microsecond that ``policy`` is expected to reach on ``rows``, deciding by the rate
    that was in force."""
    parts = stretches(rows)
    outcome = costs.outcome(rows, _chosen([policy], rows, costs, _rates(rows, costs)))
    (committed,), (time,) = outcome
    return float(parts.tokens.sum() / parts.needed(committed, time).sum())


def worth(
    champion: Policy, others: Sequence[Policy], least: Sequence[float], rows: Rows, costs: Costs
) -> tuple[Floats, Floats]:
    """What the choices of each of the others would have brought beyond the champion's, float64
    [others, n] in plain steps: the tokens at what one was worth at the rate in force, less the
    time. And what they might have lost at the most, whatever was accepted.

    Args:
        least: relative gain [others] of the champion's time that is asked of each.
    """
    rates = _rates(rows, costs)
    plain = part_of(costs.situation.costs, rows.batch_size, 0, 0)
    choice = _chosen([champion, *others], rows, costs, rates)
    committed, time = costs.outcome(rows, choice)
    mine: Floats = committed / rates - time / plain
    at_most = np.where(choice.arms == CACHE, choice.lengths, 0)
    came = np.minimum(rows.accepted, at_most)
    asked = np.asarray(least)[:, None] * (time[0] / plain)
    found: Floats = mine[1:] - mine[0] - asked
    if_none: Floats = found - (came[1:] - came[0]) / rates
    if_all: Floats = if_none + (at_most[1:] - at_most[0]) / rates
    return found, np.maximum(-np.minimum(if_none, if_all), 0.0)


def _chosen(policies: Sequence[Policy], rows: Rows, costs: Costs, rates: Floats) -> Choice:
    """What each policy chooses, [policies, n]. Those of one kind choose together: what the rows'
    steps cost is then worked out once."""
    arms = np.empty((len(policies), len(rows)), np.int8)
    lengths = np.empty(arms.shape, np.int32)
    alike: dict[tuple[bool, int], list[int]] = {}
    for place, policy in enumerate(policies):
        together = policy.kind == "survival"
        alike.setdefault((policy.use_model, -1 if together else place), []).append(place)
    with np.errstate(all="ignore"):  # of a policy whose numbers are not finite
        for (_, alone), places in alike.items():
            one = policies[places[0]]
            found = (
                estimate_alike([policies[place] for place in places], rows.features)
                if alone < 0
                else estimate(one, rows.features)
            )
            choice = decide_each(
                one, found, rows.model_expected, costs.situation, rows.batch_size, rates
            )
            arms[places], lengths[places] = choice.arms, choice.lengths
    return Choice(arms, lengths)


def _rates(rows: Rows, costs: Costs) -> Floats:
    """The rate [n] in force; where another parameter was, what was achieved by it."""
    arms = np.where(rows.arm == UNKNOWN, NONE, rows.arm).astype(np.int8)
    committed, time = costs.outcome(rows, Choice(arms, rows.verified_len))
    plain = part_of(costs.situation.costs, rows.batch_size, 0, 0)
    achieved = max(float(committed.sum() / (time / plain).sum()), LEAST_RATE)
    found = np.where(np.isfinite(rows.rate), rows.rate, achieved).astype(np.float64)
    return np.maximum(found, LEAST_RATE)


def _use_model(costs: Costs, champion: Policy) -> tuple[bool, str]:
    """Whether the model draft beats drafting nothing where no cache draft is taken."""
    if not costs.has_model:
        return champion.use_model, "model arm not observed, the champion's choice kept"
    model, none = costs.simple_rate(MODEL), costs.simple_rate(NONE)
    ratio = f"model arm at {model / none:.2f} of drafting nothing"
    if costs.seen[NONE] >= MIN_ARM:
        return model >= none, ratio
    return model * UNSEEN_MARGIN >= none, f"{ratio} (read off the line, never observed)"
