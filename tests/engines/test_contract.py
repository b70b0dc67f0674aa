"""What every engine keeps to, whichever drafts it verifies and however its policy changes.

The statements are about one :class:`~tests.engines.trials.Trial`; the reference engine runs with
each model arm in this process, vLLM in others (marked ``engine``: a start takes a minute).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.trials import (
    Ask,
    Trial,
    prefix_matched,
    tiny_trial,
    vllm_trial,
)

NEAR_TIE = 1e-3
"""Logits. Two engines add up in another order: two tokens closer than this may change places."""

ENGINES = [
    "reference, no drafter",
    "reference, chain",
    pytest.param("vllm v1 eagle3", marks=pytest.mark.engine),
    pytest.param("vllm v2 eagle3 ahead", marks=pytest.mark.engine),
    pytest.param("vllm v2 eagle3", marks=[pytest.mark.engine, pytest.mark.long]),
    pytest.param("vllm v2 suffix ahead", marks=[pytest.mark.engine, pytest.mark.long]),
    pytest.param("vllm v2 suffix", marks=[pytest.mark.engine, pytest.mark.long]),
]


@pytest.fixture(scope="module", params=ENGINES)
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    if request.param.startswith("vllm"):
        _, runner, drafts, *ahead = request.param.split()
        v2 = bool(ahead) if runner == "v2" else None
        return vllm_trial(tmp_path_factory.mktemp(runner), drafts, v2)
    return tiny_trial(model=request.param == "reference, chain")


def requests(trial: Trial, kind: str = "") -> Iterator[tuple[Ask, list[int], str]]:
    """Asks whose name begins with ``kind``, their tokens, and why they ended."""
    for ask, tokens, finish in zip(trial.asks, trial.tokens, trial.finish, strict=True):
        if ask.workload.startswith(kind):
            yield ask, tokens, finish


def events_of(trial: Trial, ask: Ask) -> list[dict[str, Any]]:
    return [e for e in trial.events if e["workload"] == ask.workload]


def test_every_token_is_the_targets_own_choice(trial: Trial) -> None:
    assert len(trial.logits_missed) == len(trial.asks) >= 10
    for ask, missed in zip(trial.asks, trial.logits_missed, strict=True):
        assert missed <= NEAR_TIE, ask.workload


def test_speculation_switched_off_drafts_nothing_and_writes_the_same(trial: Trial) -> None:
    plain = [(ask, tokens) for ask, tokens, _ in requests(trial) if not ask.speculate]
    assert plain
    for ask, tokens in plain:
        assert not events_of(trial, ask)
        for other, others, _ in requests(trial):
            if (other.prompt, other.stop_ids) == (ask.prompt, ask.stop_ids):
                common = min(other.max_tokens, ask.max_tokens)
                assert others[:common] == tokens[:common], other.workload


def test_all_arms_were_used_and_policies_really_changed(trial: Trial) -> None:
    for arm in trial.arms:
        # How often the drafter pays depends on prices measured here, beside whatever else runs.
        cycles, accepted = (4, 1) if arm == "model" else (10, 5)
        assert trial.counts["cycles"][arm] > cycles, trial.counts
        assert trial.counts["accepted"][arm] > accepted, trial.counts
    if "model" not in trial.arms:
        assert "model" not in trial.counts["cycles"]
    assert len({e["policy_version"] for e in trial.events}) > 20
    assert max(e["policy_version"] for e in trial.events) <= trial.counts["last_version"]


def test_every_cache_draft_is_labelled_once(trial: Trial) -> None:
    labelled = Counter((e["workload"], e["position"]) for e in trial.events)
    assert set(labelled.values()) == {1}
    assert set(labelled) == set(trial.drafts)
    assert len({e["number"] for e in trial.events}) == len(trial.events) > 100


def test_each_label_is_the_accepted_length_recomputed_from_the_output(trial: Trial) -> None:
    outputs = {ask.workload: tokens for ask, tokens, _ in requests(trial)}
    accepted = 0
    for event in trial.events:
        draft = trial.drafts[event["workload"], event["position"]]
        rest = outputs[event["workload"]][event["position"] :]
        assert event["draft_len"] == len(draft)
        assert event["accepted"] == prefix_matched(draft, rest)
        complete = event["accepted"] < len(rest) or event["accepted"] == len(draft)
        assert (event["censored"] == "") == complete, event
        accepted += event["accepted"]
    assert accepted > 40


def test_a_verified_label_was_seen_and_a_hindsight_one_was_not(trial: Trial) -> None:
    for event in trial.events:
        if event["label"] == "verified":
            assert event["arm"] == "cache" and event["verified_len"] > 0
            whole = event["verified_len"] >= event["draft_len"]
            assert whole or event["accepted"] < event["verified_len"]
        elif event["arm"] == "cache":
            assert event["accepted"] >= event["verified_len"] < event["draft_len"]
    assert {e["label"] for e in trial.events} == {"verified", "hindsight"}


def test_a_request_makes_the_tokens_it_asked_for(trial: Trial) -> None:
    for ask, tokens, finish in requests(trial):
        room = trial.max_model_len - len(ask.prompt)
        if finish == "length":
            assert len(tokens) == min(ask.max_tokens, room), ask.workload
        else:
            assert 0 < len(tokens) <= min(ask.max_tokens, room), ask.workload
    assert any(finish == "length" for _, _, finish in requests(trial, "short"))


def test_a_request_ends_at_its_first_stop_id(trial: Trial) -> None:
    ended = 0
    for ask, tokens, finish in requests(trial, "stop"):
        assert not set(ask.stop_ids) & set(tokens[:-1])
        assert (finish == "stop") >= (tokens[-1] in ask.stop_ids)
        ended += tokens[-1] in ask.stop_ids
    assert ended > 0


def test_the_end_of_the_context_is_reached(trial: Trial) -> None:
    reached = [
        len(ask.prompt) + len(tokens) == trial.max_model_len
        for ask, tokens, finish in requests(trial, "context")
        if finish == "length"
    ]
    assert reached and all(reached)


def test_every_request_and_token_is_accounted_for(trial: Trial) -> None:
    counts = trial.counts
    assert counts["faults"] == 0
    assert counts["started"] == counts["stopped"] == len(trial.asks)
    assert counts["tokens"] == sum(len(tokens) for tokens in trial.tokens)
    assert counts["labelled"] == len(trial.events)
