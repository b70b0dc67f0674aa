"""What every engine keeps to, whichever drafts it verifies and however its policy changes.

The statements are about one :class:`~tests.engines.trials.Trial`; the reference engine runs with
each model arm in this process, vLLM in others (marked ``engine``: a start takes a minute). Two of
these show first what else is so only where vLLM has loaded the plugin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from decoder.core.guards.draft_budget import COPIES
from decoder.engines.vllm import runner_choice
from tests.engines import interpreted
from tests.engines.trials import (
    Ask,
    Trial,
    prefix_matched,
    tiny_trial,
    vllm_trial,
)

NEAR_TIE = 1e-3
"""Logits. Two engines add up in another order: two tokens closer than this may change places."""

V1, V2 = "vllm v1 eagle3", "vllm v2 eagle3 ahead"
ENGINES = [
    "reference, no drafter",
    "reference, chain",
    pytest.param(V1, marks=pytest.mark.engine),
    pytest.param(V2, marks=pytest.mark.engine),
    pytest.param("vllm v2 eagle3", marks=[pytest.mark.engine, pytest.mark.long]),
    pytest.param("vllm v2 suffix ahead", marks=[pytest.mark.engine, pytest.mark.long]),
    pytest.param("vllm v2 suffix", marks=[pytest.mark.engine, pytest.mark.long]),
]
BESIDE = {V1: "tests.engines.mended", V2: "tests.engines.started"}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trial]:
    @cache
    def ran(name: str) -> Trial:
        _, runner, drafts, *ahead = name.split()
        # scheduled ahead as vLLM has it, once that is so
        given = {"ahead": None if ahead else False} if runner == "v2" else {}
        return vllm_trial(tmp_path_factory.mktemp(runner), drafts, given, BESIDE.get(name, ""))

    return ran


@pytest.fixture(scope="module", params=ENGINES)
def trial(request: pytest.FixtureRequest, vllm: Callable[[str], Trial]) -> Trial:
    if request.param.startswith("vllm"):
        return vllm(request.param)
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


def test_with_speculation_off_nothing_is_drafted_and_outputs_are_equal(trial: Trial) -> None:
    plain = [(ask, tokens) for ask, tokens, _ in requests(trial) if not ask.speculate]
    assert plain
    for ask, tokens in plain:
        assert not events_of(trial, ask)
        for other, others, _ in requests(trial):
            if (other.prompt, other.stop_ids) == (ask.prompt, ask.stop_ids):
                common = min(other.max_tokens, ask.max_tokens)
                assert others[:common] == tokens[:common], other.workload


def test_all_arms_and_several_policies_served(trial: Trial) -> None:
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


def test_verified_labels_come_from_verified_tokens_and_hindsight_labels_do_not(
    trial: Trial,
) -> None:
    for event in trial.events:
        if event["label"] == "verified":
            assert event["arm"] == "cache" and event["verified_len"] > 0
            whole = event["verified_len"] >= event["draft_len"]
            assert whole or event["accepted"] < event["verified_len"]
        elif event["arm"] == "cache":
            assert event["accepted"] >= event["verified_len"] < event["draft_len"]
    assert {e["label"] for e in trial.events} == {"verified", "hindsight"}


def test_a_request_gets_max_tokens_or_ends_at_a_stop(trial: Trial) -> None:
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


def test_counters_add_up_to_all_requests_and_tokens(trial: Trial) -> None:
    counts = trial.counts
    assert counts["faults"] == 0
    assert counts["started"] == counts["stopped"] == len(trial.asks)
    assert counts["tokens"] == sum(len(tokens) for tokens in trial.tokens)
    assert counts["labelled"] == len(trial.events)


# --- where vLLM has loaded the plugin


@pytest.fixture(scope="module")
def mended(vllm: Callable[[str], Trial]) -> dict[str, Any]:
    return vllm(V1).beside


@pytest.fixture(scope="module")
def made(vllm: Callable[[str], Trial]) -> dict[str, Any]:
    return vllm(V2).beside


def test_each_row_has_the_temperature_and_top_k_of_its_request(
    mended: dict[str, Any],
) -> None:
    """Two, one and three drafted tokens at temperatures 0.5, 0 (left unscaled) and 2."""
    scaled = [[x / t for x in (1.0, 2.0, 3.0, 4.0)] for t in (0.5, 0.5, 1.0, 2.0, 2.0, 2.0)]
    assert mended["scaled"] == scaled
    only, every, two = [False] * 3 + [True], [True] * 4, [False] * 2 + [True] * 2
    assert mended["kept"] == [only, only, every, two]
    assert mended["empty"] == [0, 4], "and a step without drafts"


def test_logprob_token_ids_are_refused_with_drafts(mended: dict[str, Any]) -> None:
    alone, beside = mended["refused"]
    assert not alone and beside.startswith("logprob_token_ids are not supported")


@pytest.mark.parametrize("shape", ["even", "one long"])
def test_a_step_with_drafts_stays_within_the_memory_for_logits(
    mended: dict[str, Any], shape: str
) -> None:
    """Of a mended sampler with as many drafts as there is room for."""
    assert len(mended["peaks"][shape]) == 10
    for asked, (step, plain) in mended["peaks"][shape].items():
        assert step - plain < COPIES * 1.01, asked  # a hundredth for numbers of rows and tokens


def test_streams_and_events_of_an_accelerator_are_not_replaced(mended: dict[str, Any]) -> None:
    """They would be a CPU's once what vLLM has for that were imported."""
    assert mended["streams"] is False


def test_ray_copies_hvd_variables_to_its_workers(mended: dict[str, Any]) -> None:
    for prefixes, copied in mended["ray"].items():
        assert {"HVD_WORKER_ENABLED", "HVD_WORKER_FLOOR", "HVD_WORKER_ID_KEY"} <= set(copied)
        assert {"MY_X", "OUR_X"} <= set(copied) or not prefixes


def test_an_unsupported_vllm_is_refused_before_anything_is_wrapped(mended: dict[str, Any]) -> None:
    told, wrapped = mended["other"]
    assert told.startswith("this vLLM") and "there is no vllm." in told and not wrapped


@pytest.mark.parametrize("method", ["eagle3", "suffix"])
def test_on_v2_the_config_names_our_classes_and_schedules_asynchronously(
    method: str, made: dict[str, Any]
) -> None:
    found = made[f"{method} on V2"]
    assert found["v2"] and found["ahead"] and found["scheduler"] == runner_choice.SCHEDULER
    assert found["worker"] == interpreted.WORKER


@pytest.mark.parametrize("method", ["eagle3", "suffix"])
def test_v2_is_used_only_on_request_and_the_log_names_the_variable(
    method: str, made: dict[str, Any]
) -> None:
    found = made[method]
    assert not found["v2"] and not found["ahead"] and found["scheduler"] is None
    assert found["worker"].startswith("vllm.")
    assert found["log"].count("unless VLLM_USE_V2_MODEL_RUNNER=1") == 1  # not for each method
