"""Cache drafts behind model drafts: what is proposed, what of it is verified, and its own books."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.bundle import BUCKETS, Policy, frequency_policy
from decoder.contracts.events import Origin, decode_batch, encode_batch
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.costs import LiveCosts
from decoder.drafting.suffix import SuffixCache
from decoder.floor import Floor
from decoder.labels import LabelTracker
from decoder.loops import by_graft
from decoder.payoff.model_arm import ModelArm
from decoder.policy.estimate import network
from decoder.policy.pricing import NOMINAL, CostTable
from decoder.policy.survival import BUCKET_OF, survival, yields_of
from decoder.router import Committed, DraftRouter, RequestOptions
from decoder.settings import WorkerSettings
from learner.rows import UNKNOWN, from_events
from tests.conftest import KeepingSink, naive_accepted_length
from tests.decoder.simulated import model_alone, trusting_policy

PHRASE = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
TEXT = [*PHRASE, 20, 21, *PHRASE, 22, 23, *PHRASE, 24, 25, *PHRASE, 26, 27, *PHRASE, 28]
PROMPT = [1, 2, *PHRASE, 2]
WRONG = PHRASE[3]
K = 2
CHAINS = trusting_policy(hazard=0.05, chance=0.8)
LENGTH = FEATURES.index("draft_len")


@dataclass
class Engine:
    """A target that writes ``text``, and a drafter that is wrong at ``wrong`` output places."""

    text: Sequence[int] = tuple(TEXT)
    wrong: frozenset[int] = frozenset()
    policy: Policy = CHAINS
    sink: KeepingSink = field(default_factory=KeepingSink)
    grafts: bool = True
    longest: int = 64
    most: int | None = None
    cut: int = 1000  # draft tokens that a scheduler lets through
    rest: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cache = SuffixCache(WorkerSettings(suffix_max_factor=2.0))
        self.router = DraftRouter(
            cache, self.policy, np.zeros((32, 6), np.float32), self.sink,
            True, model_draft_tokens=K, longest=self.longest, grafts=self.grafts,
            costs=LiveCosts(NOMINAL, live=False), **{"choice": model_alone(K), **self.rest},
        )  # fmt: skip
        self.cycles: list[tuple[int, list[int], list[int], int]] = []
        """Of each: output tokens before it, chain, tail, accepted."""

    def run(self, name: str = "r", asked: RequestOptions | None = None) -> list[int]:
        router, done = self.router, 1
        asked = asked or RequestOptions(len(self.text) + 40, 4096)
        router.start(name, np.array(PROMPT, np.int32), asked)
        router.observe([Committed(name, self.text[:1], 0)], len(PROMPT))
        while name in router and done < len(self.text):
            (decision,) = router.choose([name], self.most)
            draft = list(decision.tokens)
            made = 0
            if decision.arm == "model":
                made = decision.room
                draft = [
                    WRONG if done + i in self.wrong else token
                    for i, token in enumerate(self.text[done : done + made])
                ]
            chain = list(draft)
            tail = router.graft([name], [draft if made else ()])[0] if router.grafts else []
            router.drafted([name], [len(draft) + len(tail)], made)
            draft = [*draft, *tail][: self.cut]
            accepted = naive_accepted_length(draft, self.text[done:])
            if made:
                self.cycles.append((done, chain, tail, accepted))
            committed = list(self.text[done : done + accepted + 1])
            router.observe([Committed(name, committed, len(draft))], 1 + len(draft))
            done += len(committed)
        router.stop(name, "abort")
        router.settle()
        return list(self.text[:done])

    @property
    def tails(self) -> list[dict[str, Any]]:
        """Events of tails."""
        return [e._asdict() for e in self.sink.every if e.arm == "graft"]


def test_a_tail_goes_on_where_the_whole_chain_ends() -> None:
    e = Engine()
    e.run()
    held = [(at, chain, tail) for at, chain, tail, _ in e.cycles if tail]
    assert held and e.router.counters.grafts == len(held)
    assert max(len(tail) for *_, tail in held) > 4
    for at, chain, tail in held:
        cache = SuffixCache(WorkerSettings())
        cache.start("again", np.array(PROMPT, np.int32), "")
        cache.index(None)
        cache.extend("again", TEXT[:at])
        context = np.array([*PROMPT, *TEXT[:at], *chain], np.int32)
        draft = cache.propose("again", context, 500, ahead=len(chain))
        assert draft is not None and draft.tokens[: len(tail)] == tail


def test_fewer_cycles_and_the_same_text_with_tails() -> None:
    plain, grafting = Engine(grafts=False), Engine()
    assert plain.run() == grafting.run() == TEXT
    assert sum(a > K for *_, a in grafting.cycles) > 3
    assert len(grafting.cycles) < len(plain.cycles)
    assert not plain.tails and not plain.router.counters.grafts


def test_what_was_accepted_is_parted_between_chain_and_tail() -> None:
    e = Engine(wrong=frozenset({6, 19, 33}))
    odds = ModelArm(CHAINS.model_payoff, K)
    e.run()
    counters = e.router.counters
    chains = sum(min(a, len(c)) for _, c, _, a in e.cycles)
    tails = sum(max(a - len(c), 0) for _, c, _, a in e.cycles)
    assert counters.accepted["model"] == chains and counters.accepted["graft"] == tails > 5
    assert counters.drafted["model"] == sum(len(c) for _, c, *_ in e.cycles)
    assert counters.drafted["graft"] == sum(len(t) for _, _, t, _ in e.cycles)
    assert sum(counters.cycles.values()) == len(e.cycles) and "graft" not in counters.cycles
    for _, chain, _, accepted in e.cycles:
        if chain:
            odds.observe(min(accepted, len(chain)), len(chain))
    np.testing.assert_allclose(e.router.model_arm.odds, odds.odds)
    for event in e.sink.every:
        if event.arm == "model":
            assert event.verified_len <= K and event.drafted_len <= K
            assert event.model_accepted is None or event.model_accepted <= K


def test_a_tail_is_told_of_where_its_whole_chain_was_accepted() -> None:
    wrong = frozenset({6, 19, 33})
    e = Engine(wrong=wrong)
    e.run()
    told = {event["position"]: event for event in e.tails}
    known = {at + len(c): a for at, c, t, a in e.cycles if t and a >= len(c)}
    assert set(told) == set(known) and len(told) > 3
    assert any(t and a < len(c) for _, c, t, a in e.cycles), "of some nothing was known"
    for position, event in told.items():
        accepted = event["accepted"]
        verified = known[position] - K
        assert min(accepted, event["verified_len"]) == verified
        assert event["verified_len"] <= event["draft_len"] == event["features"][LENGTH]
        generated = event["features"][FEATURES.index("log_generated_len")]
        assert generated == pytest.approx(np.log1p(position))
        seen = accepted < event["verified_len"] or event["verified_len"] == event["draft_len"]
        assert event["label"] == ("verified" if seen else "hindsight")
        assert event["model_accepted"] is None
    numbers = [event.number for event in e.sink.every]
    assert sorted(numbers) == list(range(len(numbers)))


def test_its_event_keeps_the_contract_and_trains_but_prices_nothing() -> None:
    e = Engine()
    e.run()
    record = encode_batch(e.sink.every, Origin("scope", "w", "ab"), 0)
    events = decode_batch(record).events
    assert [event.arm for event in events] == [event.arm for event in e.sink.every]
    rows = from_events([event for event in events if event.arm == "graft"])
    assert len(rows) == len(e.tails) and (rows.arm == UNKNOWN).all()


def test_it_ends_with_the_room_of_request_engine_and_step() -> None:
    asked = RequestOptions(20, 4096)
    short = Engine()
    short.run(asked=asked)
    for at, chain, tail, _ in short.cycles:
        assert at + len(chain) + len(tail) <= 19
    engine = Engine(longest=5)
    engine.run()
    assert max(len(c) + len(t) for _, c, t, _ in engine.cycles) == 5
    step = Engine(most=4)
    step.run()
    assert max(len(c) + len(t) for _, c, t, _ in step.cycles) == 4


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_tail_that_a_scheduler_cut_is_believed_as_verified(cut: int) -> None:
    e = Engine(cut=cut)
    e.run()
    counters = e.router.counters
    assert counters.grafts > 3
    assert counters.drafted["model"] <= cut * len(e.cycles)
    assert bool(counters.drafted["graft"]) == (cut > K) == bool(e.tails)
    assert all(event["verified_len"] == 1 for event in e.tails)


def test_a_stop_token_in_a_tail_ends_the_request() -> None:
    e = Engine()
    e.run(asked=RequestOptions(200, 4096, stop_ids=frozenset({PHRASE[9]})))
    assert e.router.counters.tokens == 10 and not e.router.followed.requests
    e.router.settle()


@pytest.mark.parametrize("kind", ["asleep", "counting", "relieved", "a look"])
def test_no_tail_where_the_policy_does_not_foresee_it(kind: str) -> None:
    changes: dict[str, Any] = {}
    if kind == "counting":
        changes["policy"] = frequency_policy("s", float("inf"))
    floor = Floor(True)
    e = Engine(**changes, rest={"floor": floor} if kind in ("asleep", "relieved") else {})
    if kind == "asleep":
        e.router.doze.awake = False  # type: ignore[union-attr]
        e.router.doze.observe = lambda *_: None  # type: ignore[method-assign,union-attr]
    elif kind == "relieved":
        floor.in_force = "model"
        floor.add = lambda *_: None  # type: ignore[method-assign]
    elif kind == "a look":
        none = np.zeros(1, np.int8)
        e.router._choice = lambda *a, **k: model_alone(K)(*a, **k)._replace(arms=none)
        e.router._looks.arms = lambda *_, **__: np.ones(1, np.int8)  # type: ignore[assignment]
    e.run()
    assert [c for _, c, *_ in e.cycles if c] and not [t for *_, t, _ in e.cycles if t]


def test_the_floor_weighs_what_the_policy_did_with_its_tails() -> None:
    e = Engine(rest={"floor": Floor(True)})
    weighed: list[tuple[float, float]] = []
    floor = e.router.floor
    assert floor is not None

    def adding(_: Any, committed: float, outcomes: Any, __: int) -> None:
        weighed.append((committed, outcomes[0][0]))

    floor.add = adding  # type: ignore[assignment,method-assign]
    e.run()
    assert max(committed for committed, _ in weighed) > 1 + K
    assert all(committed == did for committed, did in weighed[:-1])


def test_a_lookup_ahead_of_the_text_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5, 400).tolist()
    caches = [SuffixCache(WorkerSettings()) for _ in range(2)]
    for cache in caches:
        cache.start("r", np.array(text[:100], np.int32), "")
        cache.index(None)
    for at in range(100, 390, 3):
        seen = np.array(text[:at], np.int32)
        ahead = np.array([*text[:at], 1, 2], np.int32)
        caches[1].propose("r", ahead, 30, ahead=2)
        one, other = (cache.propose("r", seen, 30) for cache in caches)
        assert one == other
        for cache in caches:
            cache.extend("r", text[at : at + 3])


def test_the_streak_behind_a_chain_is_what_it_becomes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        tracker: LabelTracker[int] = LabelTracker()
        for number in range(6):
            tracker.propose(rng.integers(0, 2, int(rng.integers(1, 7))).tolist(), number)
            ahead = rng.integers(0, 2, int(rng.integers(1, 4))).tolist()
            foreseen = tracker.streak_behind(ahead)
            if rng.random() < 0.7:
                tracker.commit(ahead)
                assert tracker.streak == foreseen


def test_the_chance_that_a_chain_holds_is_that_of_all_its_places() -> None:
    arm = ModelArm(yields_of(0.5, 4)[-1], 4)
    assert arm.holds(3) == pytest.approx(0.125, rel=1e-4)
    assert arm.holds(0) == 1.0 and arm.holds(5) == 0.0


def worth(
    lengths: Sequence[int], curves: np.ndarray, holds: np.ndarray, base: int, value: float,
    costs: CostTable,
) -> float:  # fmt: skip
    """The definition: what tails of these lengths bring beyond what they cost."""
    gained = sum(float(h * c[:k].sum()) for k, c, h in zip(lengths, curves, holds, strict=True))
    return gained * value - (costs.time(base + sum(lengths)) - costs.time(base))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000), n=st.integers(1, 3), rows=st.integers(1, 6),
    drafts=st.integers(0, 12), room=st.integers(0, 9), token=st.floats(0.0, 0.6),
    rate=st.floats(0.6, 4.0),
)  # fmt: skip
def test_the_compiled_decision_is_the_best_there_is(
    seed: int, n: int, rows: int, drafts: int, room: int, token: float, rate: float
) -> None:
    rng = np.random.default_rng(seed)
    policy = _drawn(rng)
    features = rng.normal(size=(n, NUM_FEATURES)).astype(np.float32)
    features[:, LENGTH] = rng.integers(1, 5, n)
    holds = rng.random(n)
    costs = CostTable("t", (1, 64), (1.0, 1.0 + 63 * token))
    rows = max(rows, n)
    weights, widths = policy.flat
    lengths, expected = by_graft(
        features,
        weights,
        widths,
        LENGTH,
        BUCKET_OF,
        holds,
        rows,
        0,
        drafts,
        room,
        rate,
        costs.dense,
    )
    own = features[:, LENGTH].astype(np.int64)
    curves = survival(network(policy, features), own)
    np.testing.assert_allclose(expected, curves.sum(axis=1), rtol=1e-4)
    value = costs.time(rows) / (rate * rows)
    mine = worth(lengths.tolist(), curves, holds, rows + drafts, value, costs)
    allowed = itertools.product(*(range(int(length) + 1) for length in own))
    best = max(
        worth(each, curves, holds, rows + drafts, value, costs)
        for each in allowed
        if sum(each) <= room
    )
    assert lengths.sum() <= room and (lengths <= own).all()
    assert mine == pytest.approx(best, abs=1e-5)


def _drawn(rng: np.random.Generator) -> Policy:
    weight = (rng.normal(size=(NUM_FEATURES, BUCKETS)) / 10).astype(np.float32)
    bias = rng.normal(size=BUCKETS).astype(np.float32)
    return replace(CHAINS, layers=((weight, bias),))
