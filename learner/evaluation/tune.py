"""What a policy's choices would have been worth on recorded drafts, beside the champion's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.policy.estimate import estimate, predict
from decoder.policy.rule import CACHE, MODEL, NONE
from learner.evaluation.independent import Choice, cost_shares, decide_each, estimate_each
from learner.evaluation.measured import Costs, Floats
from learner.training.rows import UNKNOWN, Rows

LEAST_RATE: Final = 0.5
"""Tokens in the time of a plain step: drafting nothing reaches one. A record may say anything."""


def tuned(policy: Policy, costs: Costs, champion: Policy, recent: Rows) -> Policy:
    """``policy`` with what decides beside its network: what a model draft brings, which each worker
    follows by itself, and for kind ``payoff`` the threshold that suits the drafts ``recent``."""
    payoff = costs.model_accepted if costs.has_model else champion.model_payoff
    # Arm none competes in every cycle, so that nothing is switched off for good.
    policy = replace(policy, use_model=True, model_payoff=payoff)
    if policy.kind == "payoff" and len(recent):
        policy = replace(policy, threshold=best_threshold(policy, recent, costs))
    return policy


def best_threshold(policy: Policy, rows: Rows, costs: Costs) -> float:
    """The threshold by which ``policy`` saves most plain steps at ``rows``, at least one, at what a
    token is worth at the rate in force. The rate of the rows by themselves would not do: a draft
    that brings ten tokens takes the place of other cycles (decision 8)."""
    with np.errstate(all="ignore"):
        predicted = np.nan_to_num(predict(policy, rows.features)).astype(np.float64)
    plain = cost_shares(costs.situation.costs, rows.batch_size, 0, 0)
    other = MODEL if costs.has_model and policy.use_model else NONE
    arms = np.repeat(np.array([[CACHE], [other]], np.int8), len(rows), axis=1)
    lengths = np.stack([rows.draft_len, np.full_like(rows.draft_len, costs.situation.model_len)])
    committed, time = costs.outcome(rows, Choice(arms, lengths))
    gains = (committed[0] - committed[1]) / _rates(rows, costs, plain)
    gains -= (time[0] - time[1]) / plain
    order = np.argsort(-predicted, kind="stable")
    cuts = predicted[order]
    saved = np.cumsum(gains[order])
    saved[:-1][cuts[:-1] == cuts[1:]] = -np.inf  # equal predictions are on one side
    last = int(saved.argmax())
    if saved[last] <= 0.0:
        return float(cuts[0]) + 1.0
    below = cuts[last + 1] if last + 1 < len(cuts) else 0.0
    return float(cuts[last] + below) / 2.0


class Worth(NamedTuple):
    """What the choices of others would have been worth at n drafts beside the champion's; float64.

    ``saved`` [others, n] are plain steps: the tokens at what one was worth at the rate in force,
    less the time. ``steps`` [n] are those that the champion's choices take.

    A model draft has a label only where it was verified. Elsewhere its mean stands in, but where
    another chooses it and the champion does not: the mean is of the drafts that were chosen, and a
    policy that prefers model drafts where none holds would be credited with it. Such a draft brings
    nothing in ``saved``; each token that it brings would save ``doubts`` [others, n] more.
    ``tried`` [others, n] are the tokens that such drafts brought where they were verified all the
    same, by a variant or a guard, and NaN elsewhere.
    """

    saved: Floats
    steps: Floats
    doubts: Floats
    tried: Floats


def worth(
    champion: Policy, others: Sequence[Policy], bounded: Sequence[bool], rows: Rows, costs: Costs
) -> Worth:
    """What the choices of each of the others would have been worth.

    Args:
        bounded: [others], whether a model draft in doubt is credited with no accepted token.
    """
    plain = cost_shares(costs.situation.costs, rows.batch_size, 0, 0)
    rates = _rates(rows, costs, plain)
    choice = _chosen([champion, *others], rows, costs, rates)
    seen = (rows.arm == MODEL) & np.isfinite(rows.model_accepted)
    mean = np.where(seen, rows.model_accepted, costs.model_accepted)
    strict = np.concatenate([[False], np.array(bounded, bool)])[:, None]
    alone = strict & (choice.arms == MODEL) & (choice.arms[0] != MODEL)
    committed, time = costs.outcome(rows, choice, np.where(alone & ~seen, 0.0, mean))
    saved: Floats = (committed[1:] - committed[0]) / rates - (time[1:] - time[0]) / plain
    doubts: Floats = np.where(alone[1:] & ~seen, 1.0 / rates, 0.0)
    tried: Floats = np.where(alone[1:] & seen, rows.model_accepted, np.nan)
    return Worth(saved, time[0] / plain, doubts, tried)


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
                estimate_each([policies[place] for place in places], rows.features)
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
