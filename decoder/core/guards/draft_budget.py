"""Draft token budget of a step: a hard limit, independent of what drafts are worth.

Expensive steps, for instance beyond the largest graph, are the cost table's business. The budget
is limited by memory, and where drafts would delay prefill.
"""

from __future__ import annotations

from typing import Final

LOGITS_BYTES: Final = 1 << 30
"""Memory for all copies of the logits in a step that verifies drafts, bytes."""
COPIES: Final = 4
"""Maximum number of float32 values that vLLM holds per token and vocabulary entry: the target's
logits, those of the drafts, a modifiable copy, and their probabilities. A greedy step, or a target
with narrower logits, needs fewer."""
DRAFTS_SHARE: Final = 8
"""1/8 of a step's tokens, less one per request, is reserved for drafts even when prompts could fill
all of it. Otherwise a long queue would end all drafting."""
NEWCOMERS_SHARE: Final = 2
"""1/2 of them is never given to drafts, which the scheduler serves first: a request that it has not
started is invisible here, and would starve while drafts fill every step. Once one has started and
filled a step, prefill gets all but the drafts' reserve. So its first token comes one step later,
plus one for each seven steps of its prompt."""

MASK_US: Final = 13.0
"""Microseconds in which vLLM fills the grammar mask of one token, on one thread while the target
runs."""


def under_grammar(requests: int, plain_us: float) -> int:
    """Maximum draft tokens of each of ``requests`` requests under a grammar: filling all masks may
    take no longer than a step that verifies nothing."""
    return max(int(plain_us / MASK_US) // max(requests, 1) - 1, 0)


def tokens_of_logits(vocabulary: int, budget: int = LOGITS_BYTES, copies: int = COPIES) -> int:
    """Tokens whose logits fit ``copies`` times into ``budget`` bytes, at least one."""
    return max(budget // (4 * copies * max(vocabulary, 1)), 1)


def room(
    rows: int,
    vocabulary: int,
    batched: int,
    waiting: int = 0,
    *,
    full: bool = False,
) -> int:
    """Draft token budget of a step, for all its requests together.

    Args:
        rows: decoding requests in the step.
        vocabulary: its size.
        batched: the engine's maximum tokens per step (``max_num_batched_tokens``).
        waiting: prompt tokens waiting for prefill, of requests that have started.
        full: whether the last step was full: then other requests may be waiting to start.
    """
    left = batched - rows
    free = 0 if full else min(left - max(waiting, 0), left - left // NEWCOMERS_SHARE)
    free = max(free, left // DRAFTS_SHARE)
    return max(min(free, tokens_of_logits(vocabulary) - rows), 0)
