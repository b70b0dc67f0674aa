"""Every token position as a state: the router's own states, and nothing from the future."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings
from learner.rows import from_events
from pipelines.replay import states
from pipelines.replay.dialogue import DialogueCache, turns
from pipelines.replay.states import States, every_token, replay
from pipelines.replay.traces import Trace
from tests.conftest import naive_accepted_length
from tests.pipelines.replay.samples import VOCABULARY, copying_traces, dialogue, token_classes

SETTINGS = WorkerSettings()


def through_the_router(traces: list[Trace], worker: WorkerSettings = SETTINGS) -> States:
    events = replay(traces, token_classes(), worker)
    index = {id(e): int(e.request.rsplit("/", 1)[1]) for e in events}
    events.sort(key=lambda e: (index[id(e)], e.position))
    return States(
        from_events(events),
        np.array([index[id(e)] for e in events], np.int32),
        np.array([e.position for e in events], np.int32),
    )


def assert_same(a: States, b: States) -> None:
    np.testing.assert_array_equal(a.trace, b.trace)
    np.testing.assert_array_equal(a.position, b.position)
    for name in ("accepted", "censored", "draft_len", "features"):
        np.testing.assert_array_equal(getattr(a.rows, name), getattr(b.rows, name), err_msg=name)


@pytest.mark.parametrize("seed", range(4))
def test_the_states_are_those_the_router_sends(seed: int) -> None:
    traces = [*copying_traces(seed), *dialogue(seed), *copying_traces(seed + 9, 2, allowed=61)]
    fast = every_token(traces, [], token_classes(), SETTINGS)
    assert_same(fast, through_the_router(traces))
    assert len(fast) > 300
    assert fast.rows.censored.any()
    assert fast.rows.accepted.max() > 6


token_lists = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=3), st.integers(1, 80))
def test_the_states_are_those_the_router_sends_for_any_text(
    texts: list[tuple[list[int], list[int]]], allowed: int
) -> None:
    traces = [
        Trace(f"s{i}", prompt, output, allowed=max(allowed, len(output)))
        for i, (prompt, output) in enumerate(texts)
    ]
    assert_same(every_token(traces, [], token_classes(), SETTINGS), through_the_router(traces))


def test_batches_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = copying_traces(3)
    whole = every_token(traces, [], token_classes(), SETTINGS)
    monkeypatch.setattr(states, "BATCH", 7)
    assert_same(every_token(traces, [], token_classes(), SETTINGS), whole)


def test_labels_are_what_a_fresh_lookup_would_have_had_accepted() -> None:
    (trace,) = copying_traces(5, 1)
    found = every_token([trace], [], token_classes(), SETTINGS)
    text, size = [*trace.prompt, *trace.output], len(trace.prompt)
    for row, position in enumerate(found.position.tolist()):
        cache = SuffixCache(SETTINGS)
        cache.start("r", np.array(trace.prompt, np.int32), "")
        cache.index(None)
        cache.extend("r", list(trace.output[:position]))
        context = np.array(text[: size + position], np.int32)
        draft = cache.propose("r", context, trace.allowed - position - 1)
        assert draft is not None
        rest = list(trace.output[position:])
        accepted = naive_accepted_length(draft.tokens, rest)
        assert found.rows.accepted[row] == accepted
        assert found.rows.censored[row] == (accepted == len(rest) < len(draft.tokens))


def differing_later(seed: int, keep: int) -> tuple[list[Trace], list[Trace]]:
    """The same recordings, except for what the last one holds from output position ``keep`` on."""
    traces = copying_traces(seed)
    rng = random.Random(seed)
    other = [rng.randrange(VOCABULARY) for _ in range(len(traces[-1].output) - keep)]
    output = [*traces[-1].output[:keep], *other]
    return traces, [*traces[:-1], replace(traces[-1], output=output)]


def features_by(found: States, last: int, keep: int) -> np.ndarray:
    return found.rows.features[(found.trace < last) | (found.position <= keep)]


@pytest.mark.parametrize("keep", [10, 25, 40, 59])
@pytest.mark.parametrize("seed", range(4))
def test_no_feature_knows_what_comes_after_its_position(seed: int, keep: int) -> None:
    one, two = (
        every_token(traces, [], token_classes(), SETTINGS) for traces in differing_later(seed, keep)
    )
    a, b = features_by(one, len(copying_traces(seed)) - 1, keep), features_by(two, 5, keep)
    np.testing.assert_array_equal(a, b)


def test_a_label_learned_before_it_is_known_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: here is the leak that it is there for."""
    follow = states._follow

    def too_early(draft, output, position, keys, due, known_at):  # type: ignore[no-untyped-def]
        label = follow(draft, output, position, keys, [[] for _ in due], known_at)
        due[position + 1].append((label, keys))
        return label

    monkeypatch.setattr(states, "_follow", too_early)
    leaks = 0
    for seed in range(4):
        one, two = (
            every_token(traces, [], token_classes(), SETTINGS)
            for traces in differing_later(seed, 40)
        )
        a, b = features_by(one, 5, 40), features_by(two, 5, 40)
        leaks += not np.array_equal(a, b)
    assert leaks


def test_warm_up_is_in_the_cache_and_not_in_the_result() -> None:
    *earlier, last = copying_traces(7)
    cold = every_token([last], [], token_classes(), SETTINGS)
    warm = every_token([last], earlier, token_classes(), SETTINGS)
    all_of_them = every_token([*earlier, last], [], token_classes(), SETTINGS)
    assert set(warm.trace) == {0}
    assert len(warm) >= len(cold)
    measured = all_of_them.trace == len(earlier)
    np.testing.assert_array_equal(warm.rows.features, all_of_them.rows.features[measured])


def test_a_dialogue_goes_on_in_one_tree_and_drafts_the_same() -> None:
    traces = [*dialogue(1, 5), *copying_traces(2)]
    kept, plain = DialogueCache(SETTINGS), SuffixCache(SETTINGS)
    drafts = 0
    for turn in turns(traces, kept):
        plain.start(turn.name, turn.prompt, "")
        plain.index(None)
        for done in range(1, len(turn.output)):
            for cache in (kept, plain):
                cache.extend(turn.name, turn.output[done - 1 : done])
            context = turn.text[: len(turn.prompt) + done]
            draft = kept.propose(turn.name, context, 64)
            assert draft == plain.propose(turn.name, context, 64)
            drafts += draft is not None
        for cache in (kept, plain):
            cache.extend(turn.name, turn.output[-1:])
        plain.stop(turn.name)
    assert drafts > 100
    assert kept.trees.continued == 4


def test_a_prompt_that_does_not_go_on_from_the_last_turn_is_indexed_anew() -> None:
    first, second = dialogue(3, 2)
    changed = replace(second, prompt=[0, *second.prompt[1:]])
    cache = DialogueCache(SETTINGS)
    for turn in turns([first, changed], cache):
        cache.extend(turn.name, turn.output)
    assert cache.trees.continued == 0


def test_an_output_of_one_token_has_no_state() -> None:
    traces = [Trace("a", [1, 2, 3], [1]), *copying_traces(1, 1)]
    assert_same(every_token(traces, [], token_classes(), SETTINGS), through_the_router(traces))


def test_no_traces_give_no_states() -> None:
    assert len(every_token([], [], token_classes(), SETTINGS)) == 0
