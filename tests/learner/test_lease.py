"""One holder a scope, whoever asks, dies, sleeps or comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.contracts.bundle import LAST_PUBLICATION, NUMBERS_A_TERM
from decoder.contracts.topics import LEASE
from learner import lease
from learner.lease import MAX_TERM, Claim, Lease, read_claim, supersedes
from tests.conftest import until
from tests.decoder.telemetry.broker import send
from tests.learner.conftest import Broker, Clock


@pytest.fixture
def lease_of(broker: Broker, clock: Clock) -> Iterator[Makes]:
    """Leases by the names of their holders, by that clock; they are closed."""
    made: list[Lease] = []

    def make(holder: str) -> Lease:
        made.append(Lease(broker.kafka, holder))
        return made[-1]

    yield make
    for each in made:
        each.close()


Makes = Callable[[str], Lease]


def turn_until(done: Callable[[], bool], *leases: Lease) -> None:
    def turn() -> None:
        for each in leases:
            each.renew({"s": 0})
        held = [each.holder for each in leases if each.holds("s")]
        assert len(held) <= 1, held

    until(done, turn=turn)


def test_one_learner_holds_and_a_failed_one_is_replaced(
    broker: Broker, lease_of: Makes, clock: Clock
) -> None:
    one, two = lease_of("one"), Lease(broker.kafka, "two")
    turn_until(lambda: one.holds("s"), one)
    turn_until(lambda: two.holder_of("s") == "one", one, two)
    left = lease.TTL_SECONDS
    assert one.term("s") == 1 and one.holds("s", left - 9.0) and not one.holds("s", left)
    assert not one.holds("another")
    clock.now += left  # the first sleeps
    turn_until(lambda: two.holds("s"), two)
    assert two.term("s") == 2 and not one.holds("s")
    turn_until(lambda: one.holder_of("s") == "two", one, two)  # and wakes
    two.close()
    turn_until(lambda: one.holds("s"), one)  # what is released is not waited for
    assert one.term("s") == 3
    again = lease_of("one")  # killed and started again, in the same place
    turn_until(lambda: again.holds("s"), again)
    assert again.term("s") == 4


def test_scopes_assigned_to_others_are_released_at_once(lease_of: Makes, clock: Clock) -> None:
    one, two = lease_of("one"), lease_of("two")
    turn_until(lambda: one.holds("s"), one)
    turn_until(lambda: one.renew({}, lambda scope: False) or not one.holds("s"))
    turn_until(lambda: two.holds("s"), two)
    assert two.term("s") == 2 and clock.now < lease.TTL_SECONDS, "none has run out"


def test_unreadable_topics_are_logged(
    bare_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """A learner without leases publishes nothing."""
    one = Lease(bare_broker.kafka, "one")
    one.renew({"s": 0})
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any(LEASE.name in each and "allowed" in each for each in told), told
    one.close()


def test_an_expired_lease_is_claimed_with_a_new_term(lease_of: Makes, clock: Clock) -> None:
    one = lease_of("one")
    turn_until(lambda: one.holds("s"), one)
    before = one.term("s")
    clock.now += lease.TTL_SECONDS  # it sleeps, and another may claim meanwhile
    assert not one.holds("s")
    turn_until(lambda: one.holds("s"), one)
    assert one.term("s") > before


def test_a_forged_term_far_ahead_is_ignored(broker: Broker, lease_of: Makes) -> None:
    """After the last that can be written there is none: a record would end a scope for good."""
    for term in (MAX_TERM, MAX_TERM + 1):
        claim = {"holder": "nobody", "term": term, "beat": 0, "released": False}
        send(broker.kafka, LEASE.name, json.dumps(claim).encode(), key=b"s")
    one, two = map(lease_of, ("one", "two"))
    turn_until(lambda: one.holds("s"), one)
    first = one.term("s")
    one.close()
    turn_until(lambda: two.holds("s"), two)
    assert (first, two.term("s")) == (1, 2) and not one.term("s")


def test_publication_numbers_of_every_term_are_valid() -> None:
    assert (MAX_TERM + 1) * NUMBERS_A_TERM <= LAST_PUBLICATION
    sound = {"holder": "h", "term": MAX_TERM, "beat": 0, "released": False}
    assert read_claim(json.dumps(sound).encode()) == Claim("h", MAX_TERM, 0)
    wrong = {"term": [0, 2**40, "x"], "beat": [-1, None], "holder": [None, "h" * 65]}
    for spoilt in ({name: each} for name, of in wrong.items() for each in of):
        assert read_claim(json.dumps({**sound, **spoilt}).encode()) is None


def test_a_recreated_topic_does_not_reuse_terms(lease_of: Makes) -> None:
    one = lease_of("one")
    turn_until(lambda: one.holds("s"), one)
    until(lambda: one.term("s") >= 7 and one.holds("s"), turn=lambda: one.renew({"s": 6}))


CLAIMS = st.lists(
    st.builds(Claim, st.sampled_from("ab"), st.integers(1, 3), st.integers(0, 3), st.booleans()),
    max_size=12,
)


@given(CLAIMS)
def test_a_term_has_one_holder(claims: list[Claim]) -> None:
    held: Claim | None = None
    holders: dict[int, str] = {}
    for claim in claims:
        if supersedes(claim, held):
            assert held is None or claim.term >= held.term
            held = claim
            assert holders.setdefault(held.term, held.holder) == held.holder
