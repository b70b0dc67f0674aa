"""The tracker gives every draft its longest common prefix with what was committed, and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decoder.labels import LabelTracker
from tests.conftest import naive_accepted_length

tokens = st.lists(st.integers(0, 2), max_size=24)


@given(draft=st.lists(st.integers(0, 2), min_size=1, max_size=12), committed=st.lists(tokens))
def test_equals_the_definition_however_the_tokens_arrive(
    draft: list[int], committed: list[list[int]]
) -> None:
    tracker: LabelTracker[str] = LabelTracker()
    tracker.propose(draft, "d")
    labels = [label for commit in committed for label in tracker.commit(commit)] + tracker.close()
    continuation = [t for commit in committed for t in commit]
    (label,) = labels
    assert label.accepted == naive_accepted_length(draft, continuation)
    reached_end = label.accepted == len(continuation) and label.accepted < len(draft)
    assert label.censored == reached_end


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 2)),
                min_size=1, max_size=30))  # fmt: skip
def test_many_drafts_at_once_each_keep_their_own_position(
    cycles: list[tuple[list[int], int]],
) -> None:
    tracker: LabelTracker[int] = LabelTracker()
    labels = []
    for position, (draft, token) in enumerate(cycles):
        tracker.propose(draft, position)
        labels += tracker.commit([token])
    labels += tracker.close()
    committed = [token for _, token in cycles]
    assert sorted(label.subject for label in labels) == list(range(len(cycles)))
    for label in labels:
        assert label.accepted == naive_accepted_length(
            cycles[label.subject][0], committed[label.subject :]
        )


def test_a_draft_waits_no_longer_than_it_is_long() -> None:
    tracker: LabelTracker[int] = LabelTracker()
    for position in range(100):
        tracker.propose([1] * 8, position)
        tracker.commit([1])
        assert len(tracker) <= 8
    assert tracker.streak == 7
