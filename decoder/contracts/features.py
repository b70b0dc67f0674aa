"""The feature vector of a cache draft: names, order, units, and the id that stands for them.

Follows Table 9 of the Hybrid Verified Decoding paper (cache match, decode state, recent history,
draft structure). Everything is known before the draft is verified. Lengths that spread over orders
of magnitude enter as ``log1p`` of tokens; shares are in 0..1.
"""

from __future__ import annotations

import hashlib
from typing import Final

TOKEN_CLASSES: Final = (
    "whitespace",  # starts with a blank: begins a new word
    "newline",
    "bracket",
    "delimiter",  # comma, colon, semicolon, quotes, pipe, slash, equals
    "punctuation",  # any other punctuation
    "digit",
)
"""Classes of a vocabulary entry; an entry may belong to several."""

RECENT: Final = 8
"""Resolved cache drafts remembered for the history features."""

FEATURES: Final = (
    # cache match
    "score",  # suffix-cache score: expected accepted tokens by counting
    "match_len",  # tokens of context matched
    "draft_len",  # tokens proposed
    "last_prob",  # counted probability that the whole draft survives
    # decode state
    "log_prompt_len",
    "log_generated_len",
    "relative_position",  # generated / allowed tokens
    # recent history, over labels resolved before this draft was proposed
    "cache_share",  # share of the last cycles that verified a cache draft
    "payoff_last",
    "payoff_2nd_last",
    "payoff_3rd_last",
    "payoff_mean",  # over the last RECENT resolved drafts
    "payoff_max",
    "streak",  # tokens matched so far by the longest draft still unresolved
    # draft structure: share of the draft's tokens in each class, then the first token's classes
    *(f"share_{c}" for c in TOKEN_CLASSES),
    *(f"first_{c}" for c in TOKEN_CLASSES),
)
NUM_FEATURES: Final = len(FEATURES)
SCHEMA_ID: Final = "hvd.features.v1-" + hashlib.sha256("\n".join(FEATURES).encode()).hexdigest()[:8]
"""Names the exact list, order and version; a policy trained on another schema is refused."""
