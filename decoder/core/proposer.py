"""Cache drafts for a step, compiled: suffix look-up and features."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Handle, Int64Array, compiled, entry_point
from decoder.contracts.features import RECENT
from decoder.core.payoff.memory import hashed, recall
from decoder.core.table import state_of
from decoder.drafting.matches import BACK, Continuation, Limits, draft, fetch, newest
from decoder.drafting.windows import ORDERS

NO_DRAFT: Final = Continuation(0, 0, 0.0, 0)


class Proposal(NamedTuple):
    """The better of two cache drafts of a request: from its own text and from its key's."""

    best: Continuation
    rival: Continuation  # the other one; of length 0 if there is none
    local: int  # 1: the best is from its own text
    rival_first: float  # probability of the rival's first token
    agreement: int  # length of their common prefix


@compiled
def room_of(request: Any, longest: int) -> int:
    """Maximum draft tokens of a request, at most ``longest``; one is left for the target's own.

    Below ``min_tokens`` a draft stays short of it: vLLM masks stop tokens at every draft position
    by the request's length before the step.
    """
    if not request["speculates"] or request["ended"]:
        return 0
    num_output = request["length"] - request["prompt_len"]
    remaining = request["max_tokens"] - num_output
    remaining = min(remaining, request["max_length"] - request["length"]) - 1
    until_min = request["min_tokens"] - num_output
    return int(min(remaining, longest, until_min - 1 if until_min > 0 else longest))


@compiled
def classify(features: Any, tokens: NDArray[np.int32], classes: NDArray[np.float32]) -> None:
    """Share of a draft's tokens in each class, and the classes of its first token; ids beyond the
    vocabulary have none. Mutates ``features``."""
    shares, firsts, width = features["shares"], features["firsts"], classes.shape[1]
    shares[:] = np.float32(0.0)
    firsts[:] = np.float32(0.0)
    for position in range(len(tokens)):
        token = tokens[position]
        if 0 <= token < len(classes):
            for c in range(width):
                shares[c] += classes[token, c]
                if position == 0:
                    firsts[c] = classes[token, c]
    for c in range(width):
        shares[c] /= np.float32(len(tokens))


@compiled
def describe_match(features: Any, proposal: Proposal, probs: NDArray[np.float32]) -> None:
    """Fill the look-up features of a draft whose tokens survive with ``probs``."""
    best, rival, length = proposal.best, proposal.rival, proposal.best.length
    features["score"], features["match_len"] = best.score, best.match
    features["draft_len"] = length
    features["log_score"] = np.log1p(features["score"])
    features["log_match"] = np.log1p(features["match_len"])
    features["log_len"] = np.log1p(features["draft_len"])
    features["log_rival_score"] = np.log1p(np.float32(rival.score))
    features["log_rival_match"] = np.log1p(np.float32(rival.match))
    features["log_rival_len"] = np.log1p(np.float32(rival.length))
    features["log_agreement"] = np.log1p(np.float32(proposal.agreement))
    features["score_share"], features["last_prob"] = best.score / length, probs[length - 1]
    for i in range(5):
        position = (1 << i) - 1
        features["probs"][i] = probs[position] if position < length else np.float32(0.0)
    features["rival_prob_1"] = proposal.rival_first
    features["agreement_share"] = proposal.agreement / length
    features["disagree"] = rival.length > 0 and proposal.agreement == 0
    features["local"] = proposal.local


@compiled
def describe_request(features: Any, handle: Handle, slot: int) -> None:
    """Fill the features of a request's history."""
    table = state_of(handle).table
    request = table.requests[slot]
    num_output = request["length"] - request["prompt_len"]
    since_break = max(num_output - request["broke_at"], 0)
    features["log_prompt_len"] = np.log1p(np.float32(request["prompt_len"]))
    features["log_generated_len"] = np.log1p(np.float32(num_output))
    features["log_since_break"] = np.log1p(np.float32(since_break))
    features["relative_position"] = num_output / max(request["max_tokens"], 1)
    features["cache_share"] = request["cache_share"]
    payoffs, num_payoffs = request["payoffs"], request["num_payoffs"]
    for i in range(3):
        features["payoffs"][i] = payoffs[(num_payoffs - 1 - i) % RECENT] if num_payoffs > i else 0
    total, most = 0, 0
    for i in range(min(num_payoffs, RECENT)):
        total += payoffs[i]
        most = max(most, payoffs[i])
    features["payoff_mean"] = total / max(min(num_payoffs, RECENT), 1)
    features["payoff_max"] = most
    oldest = table.open[slot, 0]
    features["streak"] = table.cycles[oldest]["matched"] if request["num_open"] else 0
    features["first_recent"] = request["first"]
    features["log_payoff_fast"] = request["log_fast"]
    features["log_payoff_slow"] = request["log_slow"]
    features["model_recent"] = request["model_recent"]


@compiled
def keys_of(
    context: NDArray[np.int32], length: int, tokens: NDArray[np.int32], keys: NDArray[np.int64]
) -> None:
    """Fill ``keys`` with payoff memory keys, in the order of ``MEMORY_KEYS``."""
    keys[0] = hashed(tokens, 0, min(len(tokens), 8), 11)
    keys[1] = hashed(context, BACK - min(length, 2), BACK, 22)
    keys[2] = hashed(tokens, 0, 1, hashed(context, BACK - min(length, 1), BACK, 33) & 0x7FFFFFFF)


@compiled
def describe(
    handle: Handle, slot: int, row: int, proposal: Proposal, probs: NDArray[np.float32]
) -> None:
    """Fill features and keys of the draft in row ``row`` of the offers; its tokens are there."""
    state = state_of(handle)
    features, request = state.offers.drafts[row], state.table.requests[slot]
    tokens, keys = state.offers.tokens[row, : proposal.best.length], state.offers.keys[row]
    keys_of(request["context"], request["length"], tokens, keys)
    describe_match(features, proposal, probs)
    describe_request(features, handle, slot)
    memory = state.payoffs.memories[request["memory"]]
    features["tenant_first"], features["tenant_log_payoff"] = memory["first"], memory["log_payoff"]
    recall(state.payoffs, request["memory"], keys, features["memory"])
    classify(features, tokens, state.classes)


@compiled
def look_up(handle: Handle, slot: int, limits: Limits) -> Proposal:
    """Look up drafts in a request's own text and its key's: ``own`` and ``others`` of the state."""
    state = state_of(handle)
    pool, request, scratch = state.pool, state.table.requests[slot], state.scratch
    index, agreement = request["index"], 0
    shared = pool.windows[index]["shared"]
    context = request["context"][BACK - min(request["length"], BACK) :]
    own, other = draft(pool, index, context, limits, state.own, scratch), NO_DRAFT
    if shared > 0:
        other = draft(pool, shared, context, limits, state.others, scratch)
    for i in range(min(own.length, other.length)):
        if state.own.tokens[i] != state.others.tokens[i]:
            break
        agreement += 1
    if own.length == 0 or (other.length > 0 and other.score > own.score):
        first = float(state.own.probs[0]) if own.length else 0.0
        return Proposal(other, own, 0, first, agreement)
    first = float(state.others.probs[0]) if other.length else 0.0
    return Proposal(own, other, 1, first, agreement)


@compiled
def prefetch(handle: Handle, slots: NDArray[np.int64]) -> None:
    """Prefetch the hash chains that a step's look-ups will follow."""
    state = state_of(handle)
    pool = state.pool
    indexes = np.empty(2 * len(slots), np.int64)
    positions = np.empty((2 * len(slots), len(ORDERS)), np.int64)
    for i in range(len(indexes)):
        request = state.table.requests[slots[i // 2]]
        own, context = request["index"], request["context"]
        indexes[i] = own if i % 2 == 0 else pool.windows[own]["shared"]
        for order in range(len(ORDERS)):
            positions[i, order] = newest(pool, indexes[i], context, order)
    fetch(pool, indexes, positions)


@entry_point
def propose(handle: Handle, slots: Int64Array, longest: int, limits: Limits) -> tuple[int, int]:
    """Look up the cache drafts of a step within ``limits`` and compute their features: fills the
    state's ``offers``.

    Args:
        slots: of the step's requests, -1 if not tracked.
        longest: maximum tokens of any draft.

    Returns:
        number of requests that may have a draft, and of those with a cache draft.
    """
    state = state_of(handle)
    offers, n, m = state.offers, 0, 0
    if limits.most > 0:
        prefetch(handle, slots)
    for position in range(len(slots)):
        slot = slots[position]
        max_tokens = room_of(state.table.requests[slot], longest) if slot >= 0 else 0
        if max_tokens <= 0 or n == len(offers.candidates):
            continue
        candidate = offers.candidates[n]
        candidate["place"], candidate["room"], candidate["draft"] = position, max_tokens, -1
        request, candidate["unable"] = state.table.requests[slot], 0
        candidate["unread"] = request["length"] - request["drafted_at"]
        n += 1
        most = min(max_tokens, limits.most)
        if most <= 0 or request["index"] == 0:
            continue
        depth, _, factor, offset, least = limits
        proposal = look_up(handle, slot, Limits(depth, most, factor, offset, least))
        length = proposal.best.length
        if length == 0:
            continue
        best = state.own if proposal.local else state.others
        offers.tokens[m, :length] = best.tokens[:length]
        describe(handle, slot, m, proposal, best.probs)
        candidate["draft"] = m
        m += 1
    return n, m
