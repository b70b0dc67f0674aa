"""Cache drafts are the library's own, with what its other tree had to say."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.drafting.suffix import SuffixCache, common_prefix
from decoder.labels import naive_accepted_length
from decoder.settings import WorkerSettings

tokens = st.lists(st.integers(0, 4), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None)
@given(earlier=tokens, prompt=tokens, output=tokens, factor=st.sampled_from([0.5, 1.0, 2.0]))
def test_the_draft_is_the_one_the_library_would_choose(
    earlier: list[int], prompt: list[int], output: list[int], factor: float
) -> None:
    cache = SuffixCache(WorkerSettings(suffix_max_factor=factor))
    cache.start("before", np.array([9], np.int32), "")
    cache.extend("before", earlier)
    cache.stop("before")
    cache.start("now", np.array(prompt, np.int32), "")
    cache.extend("now", output)
    context = np.array(prompt + output, np.int32)
    found = cache.propose("now", context, 30)
    theirs = cache._active["now"].speculate(
        "now", context[-64:], max_spec_tokens=30, max_spec_factor=factor
    )
    if found is None:
        assert not theirs.token_ids
        return
    assert (found.tokens, found.probs) == (theirs.token_ids, theirs.probs)
    assert (found.score, found.match_len) == (theirs.score, theirs.match_len)
    if found.rival is not None:
        assert found.rival.score <= found.score and found.rival.local != found.local
        assert found.agreement == naive_accepted_length(found.tokens, found.rival.tokens)


@given(tokens, tokens)
def test_common_prefix_is_its_definition(a: list[int], b: list[int]) -> None:
    assert common_prefix(a, b) == naive_accepted_length(a, b)
