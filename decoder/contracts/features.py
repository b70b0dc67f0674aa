"""The feature vector of a cache draft: names, order, units, and schema id.

It begins with Table 9 of the Hybrid Verified Decoding paper. Added are features that an ablation on
recorded agent traffic found worth their microseconds: both drafts (from the request's own text and
from its key's outputs) and their agreement, payoffs over two time scales, and a memory of payoffs
in similar contexts. All are known before the draft is verified. Lengths that span orders of
magnitude enter as ``log1p`` of tokens; shares and probabilities are in 0..1.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

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

MEMORY_KEYS: Final = ("draft", "context", "joint")
"""Keys of the payoff memory: the draft's first eight tokens, the last two tokens of context, and
the last token of context with the draft's first. The best three of twelve keys tried."""

LOGGED: Final = (
    "log_score",
    "log_match",
    "log_len",
    "log_rival_score",  # of the other text's draft; 0 if it has none
    "log_rival_match",
    "log_rival_len",
    "log_agreement",  # tokens on which both texts' drafts begin alike
    "log_prompt_len",
    "log_generated_len",
    "log_since_break",  # tokens committed since a cache draft was last rejected
)
"""Features that are the ``log1p`` of a count; they come first."""

FEATURES: Final = (
    *LOGGED,
    # cache match
    "score",  # suffix-cache score: expected accepted tokens by counting
    "match_len",  # tokens of context matched
    "draft_len",  # tokens proposed
    "score_share",  # score / draft_len
    "last_prob",  # counted probability that the whole draft survives
    "prob_1",  # the same up to its 1st, 2nd, 4th, 8th, 16th token; 0 beyond its end
    "prob_2",
    "prob_4",
    "prob_8",
    "prob_16",
    "rival_prob_1",
    "agreement_share",  # agreement / draft_len
    "disagree",  # 1: both texts have a draft and differ in its first token
    "local",  # 1: the draft comes from the request's own text
    # decode state
    "relative_position",  # generated / allowed tokens
    # recent history, over labels resolved before this draft was proposed
    "cache_share",  # share of the last cycles that verified a cache draft
    "payoff_last",
    "payoff_2nd_last",
    "payoff_3rd_last",
    "payoff_mean",  # over the last RECENT resolved drafts
    "payoff_max",
    "streak",  # tokens matched so far by the longest draft still unresolved
    "first_recent",  # decayed share of drafts whose first token was accepted
    "log_payoff_fast",  # decayed mean of log1p(payoff), over about 3 drafts
    "log_payoff_slow",  # the same over about 20
    "tenant_first",  # decayed over about 500 drafts of the tenant
    "tenant_log_payoff",
    "model_recent",  # decayed accepted length of the request's model drafts, tokens
    # payoff memory, by key: decayed mean of log1p(payoff) and of payoff / length, and its weight
    *(f"{key}_{what}" for key in MEMORY_KEYS for what in ("log_payoff", "share", "log_weight")),
    # draft structure: share of the draft's tokens in each class, then the first token's classes
    *(f"share_{c}" for c in TOKEN_CLASSES),
    *(f"first_{c}" for c in TOKEN_CLASSES),
)
NUM_FEATURES: Final = len(FEATURES)
SCHEMA_ID: Final = "hvd.features.v2-" + hashlib.sha256("\n".join(FEATURES).encode()).hexdigest()[:8]
"""Identifies list, order and version; a policy trained on another schema is refused."""

RECALLED: Final = np.dtype(
    [("log_payoff", "f4"), ("share", "f4"), ("log_weight", "f4")], align=True
)
"""An entry of the payoff memory."""
_FAMILIES: Final = {
    "probs": ("prob_1", "f4", 5),
    "payoffs": ("payoff_last", "f4", 3),
    "memory": (f"{MEMORY_KEYS[0]}_log_payoff", RECALLED, len(MEMORY_KEYS)),
    "shares": (f"share_{TOKEN_CLASSES[0]}", "f4", len(TOKEN_CLASSES)),
    "firsts": (f"first_{TOKEN_CLASSES[0]}", "f4", len(TOKEN_CLASSES)),
}
FEATURE_ROW: Final = np.dtype(
    {
        "names": [*FEATURES, *_FAMILIES],
        "formats": ["f4"] * NUM_FEATURES + [(form, (n,)) for _, form, n in _FAMILIES.values()],
        "offsets": [4 * FEATURES.index(name) for name in FEATURES]
        + [4 * FEATURES.index(first) for first, _, _ in _FAMILIES.values()],
        "itemsize": 4 * NUM_FEATURES,
    },
    align=True,
)
"""A draft's features by name, and families of them as sub-arrays. The same memory is a row of the
float32 matrix [n, features] that networks read."""
