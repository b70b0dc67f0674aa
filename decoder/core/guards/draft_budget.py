"""How many draft tokens a step has room for, whatever they are worth.

What has a price is no matter of room: a step beyond the largest graph is dear, and the cost table
says so. Room ends where memory does, and where drafts would keep prompts waiting.
"""

from __future__ import annotations

from typing import Final

LOGITS_BYTES: Final = 1 << 30
"""Memory for all that one step makes of its logits, where it verifies."""
COPIES: Final = 4
"""Float32 for each entry of the vocabulary and each token that vLLM holds at once at most: the
target's logits, those of the drafts, a copy to change, and their probabilities. A step that
is greedy, or whose target's logits are narrower, holds fewer."""
DRAFTS_SHARE: Final = 8
"""Of what a step has left beside its requests, one part in so many belongs to drafts even while
prompts wait for all of it: a long queue would else end all drafting."""
NEWCOMERS_SHARE: Final = 2
"""One part in so many never belongs to drafts, which the scheduler serves first: a request that it
has not begun is seen by nobody else, and would wait for as long as drafts fill every step. Once one
has begun and filled a step, it has all but the share of drafts: so its first token comes a step
later, and one more for each seven steps that its prompt takes."""

MASK_US: Final = 13.0
"""What vLLM takes to fill the mask of one token of a request under a grammar, on one thread and
while the target runs."""


def under_grammar(requests: int, plain_us: float) -> int:
    """Draft tokens of each of so many requests under a grammar, so that filling the masks of all
    takes no longer than a step that verifies nothing."""
    return max(int(plain_us / MASK_US) // max(requests, 1) - 1, 0)


def tokens_of_logits(vocabulary: int, budget: int = LOGITS_BYTES, copies: int = COPIES) -> int:
    """Tokens of which so many copies of the logits fit into ``budget`` bytes, at least one."""
    return max(budget // (4 * copies * max(vocabulary, 1)), 1)


def room(
    rows: int,
    vocabulary: int,
    batched: int,
    waiting: int = 0,
    *,
    full: bool = False,
) -> int:
    """Draft tokens that a step has room for, all its requests together.

    Args:
        rows: requests that decode in it.
        vocabulary: entries of it.
        batched: tokens that the engine puts into one step at most (``max_num_batched_tokens``).
        waiting: prompt tokens that wait to be read, of requests that have begun.
        full: whether the last step had no more room: then others may wait to begin.
    """
    left = batched - rows
    free = 0 if full else min(left - max(waiting, 0), left - left // NEWCOMERS_SHARE)
    free = max(free, left // DRAFTS_SHARE)
    return max(min(free, tokens_of_logits(vocabulary) - rows), 0)
