"""A draft's label is its longest common prefix with what was committed behind it, and no more."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.features import FEATURES
from decoder.core.router import Committed, RequestOptions
from decoder.core.table import OPEN
from tests.conftest import naive_accepted_length
from tests.decoder.simulated import Router
from tests.engines.trials import drafts_in

few = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@settings(max_examples=60)
@given(few, st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=60))
def test_every_draft_keeps_its_own_place_however_many_wait(
    prompt: list[int], commits: list[list[int]]
) -> None:
    router = Router(1e9)
    router.start("r", np.array(prompt, np.int32), RequestOptions(1 << 20, 1 << 21))
    drafts: dict[int, list[int]] = {}  # by output tokens before it
    text: list[int] = []
    streaks = {}
    for committed in commits:
        waiting = [
            at for at, draft in drafts.items()
            if naive_accepted_length(draft, text[at:]) == len(text) - at < len(draft)
        ]  # fmt: skip
        table = router.table.arrays
        assert table.requests[router.table.slots["r"], OPEN] == len(waiting)
        router.choose(["r"])
        for *_, tokens in drafts_in(router, ["r"]):
            drafts[len(text)] = tokens
            streaks[len(text)] = max((len(text) - at for at in waiting), default=0)
        text += committed
        router.observe([Committed("r", committed, 0)], 1)
    router.close()
    assert sorted(event.position for event in router.kept.events) == sorted(drafts)
    for event in router.kept.events:
        draft, behind = drafts[event.position], text[event.position :]
        assert event.accepted == naive_accepted_length(draft, behind)
        assert event.features[FEATURES.index("streak")] == streaks[event.position]
        censored = event.accepted == len(behind) < len(draft)
        assert event.censored == ("abort" if censored else "")
