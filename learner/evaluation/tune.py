"""What a policy's choices would have been worth on recorded drafts, beside the champion's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.policy.estimate import decide_each, estimate, estimate_alike, predict
from decoder.policy.pricing import cost_shares
from decoder.policy.rule import CACHE, NONE, Choice
from learner.evaluation.measured import Costs, Floats
from learner.training.rows import UNKNOWN, Rows

LEAST_RATE: Final = 0.5
"""Tokens in the time of a plain step: drafting nothing reaches one. A record may say anything."""


def tuned(policy: Policy, costs: Costs, champion: Policy) -> Policy:
    """``policy``, of survival, with what decides beside its network: the rate that a worker
    achieves, and what a model draft brings, which each worker follows by itself."""
    payoff = costs.model_accepted if costs.has_model else champion.model_payoff
    # Arm none competes in every cycle, so that nothing is switched off for good.
    return replace(policy, use_model=True, model_payoff=payoff)


def worth(
    champion: Policy, others: Sequence[Policy], least: Sequence[float], rows: Rows, costs: Costs
) -> tuple[Floats, Floats]:
    """What the choices of each of the others would have brought beyond the champion's, float64
    [others, n] in plain steps: the tokens at what one was worth at the rate in force, less the
    time. And what they might have lost at the most, whatever was accepted.

    Args:
        least: relative gain [others] of the champion's time that is asked of each.
    """
    plain = cost_shares(costs.situation.costs, rows.batch_size, 0, 0)
    rates = _rates(rows, costs, plain)
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


def _rates(rows: Rows, costs: Costs, plain: Floats) -> Floats:
    """The rate [n] in force; where another parameter was, what was achieved by it. ``plain`` [n] is
    the time of steps that draft nothing."""
    arms = np.where(rows.arm == UNKNOWN, NONE, rows.arm).astype(np.int8)
    committed, time = costs.outcome(rows, Choice(arms, rows.verified_len))
    achieved = max(float(committed.sum() / (time / plain).sum()), LEAST_RATE)
    found = np.where(np.isfinite(rows.rate), rows.rate, achieved).astype(np.float64)
    return np.maximum(found, LEAST_RATE)


def error_of(policy: Policy, rows: Rows) -> float:
    """Mean absolute error in tokens, of a label that is a lower bound only how far it was missed; a
    prediction that is no number counts as none. 0 without rows."""
    if not len(rows):
        return 0.0
    with np.errstate(all="ignore"):
        error = np.nan_to_num(predict(policy, rows.features)) - rows.accepted
    missed = np.where(rows.censored, np.minimum(error, 0.0), error)
    return float(np.abs(missed).mean(dtype=np.float64))
