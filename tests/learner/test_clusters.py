"""Sessions become clusters that are final, in whatever way their drafts interleave."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import clusters
from learner.clusters import CAP, PATIENCE, SILENCE, Cluster, Clusters

BLOCK = 8


def fed(found: Clusters, sessions: list[int], first: int = 0) -> list[Cluster]:
    closed = []
    for at in range(0, len(sessions), BLOCK):
        block = np.array(sessions[at : at + BLOCK], np.uint64)
        numbers = np.stack([np.ones(len(block)), first + at + np.arange(len(block))], axis=1)
        closed += found.add(block, numbers)
    return closed


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=300))
def test_every_row_is_in_one_cluster_or_waits(sessions: list[int]) -> None:
    found = Clusters(2)
    closed = fed(found, sessions)
    whole = len(sessions)
    waiting = found.snapshot()[0]["counts"][:, 1].sum()
    assert sum(c.rows for c in closed) + waiting == whole
    assert all(c.sums[0] == c.rows for c in closed)
    assert max((c.rows for c in closed), default=0) < CAP + BLOCK


def test_a_silent_session_is_over_and_the_next_draft_of_it_begins_another() -> None:
    found = Clusters(2)
    others = [1_000 + n // CAP for n in range(10 * CAP)]
    closed = fed(found, [7] * 5 + others)
    assert [c.rows for c in closed if c.rows == 5] == [5]
    again = fed(found, [7] * 3 + [2_000 + n // CAP for n in range(10 * CAP)])
    (later,) = [c for c in again if c.rows == 3]
    assert later.born == 0, "what was learned since then may have been learned from this session"


def test_a_session_waits_the_longer_the_more_are_under_way() -> None:
    found = Clusters(2)
    rounds, sessions = 4, 64
    closed = fed(found, [s for _ in range(rounds) for s in range(sessions)])
    assert SILENCE < sessions * (rounds - 1) < SILENCE + PATIENCE * sessions
    assert not closed


def test_one_endless_session_is_born_anew() -> None:
    closed = fed(Clusters(2), [3] * (3 * clusters.LONG))
    assert len(Counter(c.born for c in closed)) == 3


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "MOST_OPEN", 20)
    monkeypatch.setattr(clusters, "SESSIONS", 50)
    found = Clusters(2)
    fed(found, list(range(1_000)))
    arrays, _ = found.snapshot()
    assert len(arrays["open"]) <= 20 and len(arrays["sessions"]) <= 50


def test_clusters_go_on_from_a_snapshot() -> None:
    sessions = np.random.default_rng(5).integers(0, 12, 400).tolist()
    one = Clusters(2)
    fed(one, sessions[:200])
    other = Clusters.restored(2, one.snapshot())
    mine, theirs = fed(one, sessions[200:], 200), fed(other, sessions[200:], 200)
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs, strict=True):
        assert (a.born, a.rows, a.sums.tolist()) == (b.born, b.rows, b.sums.tolist())
    with pytest.raises(ValueError, match="columns"):
        Clusters.restored(3, one.snapshot())
