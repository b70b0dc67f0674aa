"""Grafting: a cache draft behind a model draft, verified with it in one step.

Once the model drafter has made its chain, the suffix cache is asked what it would propose were the
whole chain committed. What it proposes is judged like any cache draft, by the features of that
text; each of its positions is worth its survival times the chance that the chain is accepted whole,
and as many are appended, over all requests of the step, as are worth their time.

Chain and tail are functions of the prefix alone: the drafter takes its likeliest tokens, and the
cache and the payoffs it is judged by hold nothing but what was committed. So what is verified is
one linear, deterministic draft, and verification stays lossless, greedy and sampled, as it is for
either of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.features import FEATURES
from decoder.drafting.drafts import CacheDraft
from decoder.loops import by_graft
from decoder.payoff.featurize import DraftState, featurize
from decoder.payoff.memory import memory_keys
from decoder.payoff.model_arm import ModelArm
from decoder.policy.pricing import CostTable
from decoder.policy.rule import GRAFT
from decoder.policy.survival import BUCKET_OF
from decoder.requests import Cycle, Request, Step, Tail

Lookup = Callable[[Request, Sequence[int]], CacheDraft | None]
"""What the cache would propose for a request behind a chain, as far as the request has room."""


def graft(
    step: Step,
    grown: Sequence[tuple[Request, Cycle, Sequence[int]]],
    look_up: Lookup,
    classes: NDArray[np.float32],
    arm: ModelArm,
    costs: CostTable,
    drafts: int,
    room: int,
) -> list[list[int]]:
    """The tail of each model draft of ``grown``, in their order; empty where none pays.

    Mutates the cycles, which hold their tails, and ``step``: what the policy wants of it.

    Args:
        step: as it was chosen, by a policy of the kind ``survival``.
        grown: requests whose cycles take the model arm, with the chains that were made.
        classes: float32 [vocabulary, classes].
        arm: what is known of model drafts.
        drafts: tokens that the step verifies already, of all its requests.
        room: draft tokens more.
    """
    policy = step.policy
    assert policy is not None and policy.kind == "survival", "no other foresees each position"
    tails: list[list[int]] = [[] for _ in grown]
    rows, states = [], []
    for row, (request, _, chain) in enumerate(grown):
        draft = look_up(request, chain)
        if draft is not None:
            rows.append(row)
            states.append(_state_behind(request, chain, draft))
    if not rows:
        return tails
    features = featurize(states, classes)
    weights, widths = policy.flat
    holds = np.array([arm.holds(len(grown[row][2])) for row in rows])
    lengths, expected = by_graft(
        features, weights, widths, _DRAFT_LEN, BUCKET_OF, holds, step.batch, step.beside, drafts,
        room, step.parameter, costs.dense,
    )  # fmt: skip
    own = replace(
        step, arms=[GRAFT] * len(rows), expected=expected, features=features,
        model=np.array([step.model[grown[row][1].row] for row in rows], np.float32),
    )  # fmt: skip
    for i, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        if not length:
            continue
        _, cycle, chain = grown[row]
        proposed = states[i].draft.tokens
        mine = Cycle(
            own, i, i, cycle.index, cycle.position + len(chain), len(proposed), states[i].keys
        )
        cycle.tail = Tail(proposed, len(chain), length, mine)
        tails[row] = list(proposed[:length])
        step.wanted += length
    return tails


def _state_behind(request: Request, chain: Sequence[int], draft: CacheDraft) -> DraftState:
    """What ``draft`` is judged by, were ``chain`` committed."""
    return DraftState(
        draft, request.prompt_len, request.generated + len(chain), request.options.max_tokens,
        request.labels.streak_behind(chain), request.history, request.memory,
        memory_keys((*request.tail, *chain)[-2:], draft.tokens),
    )  # fmt: skip


_DRAFT_LEN: Final = FEATURES.index("draft_len")
