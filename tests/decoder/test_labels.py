"""The tracker gives every draft its longest common prefix with what was committed, and no more."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from decoder.core.labels import LabelTracker
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


few = st.lists(st.integers(0, 1), min_size=1, max_size=8)


@given(st.lists(st.tuples(few, st.lists(st.integers(0, 1), min_size=1, max_size=3)), max_size=30))
def test_many_drafts_at_once_each_keep_their_own_position(
    cycles: list[tuple[list[int], list[int]]],
) -> None:
    tracker: LabelTracker[int] = LabelTracker()
    labels, text = [], [token for _, tokens in cycles for token in tokens]
    drafts: dict[int, list[int]] = {}
    done = 0

    def matched(position: int) -> int:
        return naive_accepted_length(drafts[position], text[position:done])

    for draft, committed in cycles:
        drafts[done] = draft
        tracker.propose(draft, done)
        done += len(committed)
        waiting = [p for p in drafts if matched(p) == done - p < len(drafts[p])]
        behind = max((done - p for p in waiting), default=0)
        labels += tracker.commit(committed)
        assert tracker.streak == behind and len(tracker) == len(waiting)
    labels += tracker.close()
    assert sorted(label.subject for label in labels) == sorted(drafts)
    for label in labels:
        assert label.accepted == matched(label.subject)
        assert label.censored == (
            label.accepted == done - label.subject < len(drafts[label.subject])
        )


class Counted(list[int]):
    """Tokens that count how often anybody looks at them."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(index)


def test_drafts_that_foresee_the_same_are_compared_together() -> None:
    """Text that is copied has as many drafts under way as one is long."""
    tracker: LabelTracker[int] = LabelTracker()
    text, looks = list(range(200)), []
    for position in range(63):
        tracker.propose(Counted(text[position : position + 64]), position)
        Counted.looks = 0
        assert not tracker.commit([position])
        looks.append(Counted.looks)
    assert len(tracker) == 63 and max(looks) <= 2


def test_a_draft_waits_no_longer_than_it_is_long() -> None:
    tracker: LabelTracker[int] = LabelTracker()
    for position in range(100):
        tracker.propose([1] * 8, position)
        tracker.commit([1])
        assert len(tracker) <= 8
    assert tracker.streak == 7
