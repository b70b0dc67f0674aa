"""On vLLM's V2 runner: steps are cut to what was chosen, and outputs stay the target's own."""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from decoder.engines.vllm.adapter import Adapter
from decoder.engines.vllm.ranks import Ranks
from decoder.engines.vllm.v2.batch import Batch
from tests.engines import asked, interpreted, two_heads
from tests.engines.configs import config
from tests.engines.plugged import real, run_apart
from tests.engines.scheduled_ahead import Ahead
from tests.engines.test_vllm_adapter import ask, copying, is_whole, observed, serve
from tests.engines.trials import swapped_policies

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


def engine(method: str, queue: int, **rest: Any) -> Ahead:
    blocks = rest.pop("blocks", 400)
    return Ahead(config(method, **rest), copying, queue=queue, blocks=blocks)


EACH_WAY = pytest.mark.parametrize(
    ("method", "queue"), list(itertools.product(("eagle3", "suffix"), (1, 2)))
)


@EACH_WAY
def test_verified_lengths_equal_the_chosen_ones(method: str, queue: int) -> None:
    e = engine(method, queue, tokens=16)
    noted = observed(e)
    serve(e)
    is_whole(e)
    assert set(e.finished.values()) == {"length"}
    assert all(verified == chosen for _, chosen, verified in e.told)
    assert len({verified for _, _, verified in e.told}) > 5
    followed = [verified for _, verified, *_ in noted]
    assert sum(followed) <= e.verified <= sum(followed) + 16 * len(e.outputs)
    cycles = e.worker.router.counters.cycles
    assert cycles["cache"] > 10 and (cycles["model"] > 5) == (method == "eagle3")
    told = sum(stats.num_draft_tokens for stats in e.stats)  # by vLLM's own counters
    # a step of a request that had ended by then is not counted
    assert 0 < told <= e.verified <= told + 16 * len(e.outputs)
    assert told < e.verified + 1 if queue == 1 else told


@EACH_WAY
def test_ended_requests_are_no_longer_tracked(method: str, queue: int) -> None:
    e = engine(method, queue, tokens=16)
    stops = {str(i): int(copying(str(i))[40 + i + 30]) for i in range(3)}
    for name, token in stops.items():
        e.ask(name, 40 + int(name), 120, stop_token_ids=[token])
    e.ask("3", 43, 1)
    e.ask("4", 44, 10_000)
    e.run(8)
    e.abort("4")
    e.run()
    is_whole(e)
    for name, token in stops.items():
        assert e.outputs[name].index(token) == len(e.outputs[name]) - 1
        assert e.finished[name] == "stop"
    counters = e.worker.router.counters
    assert len(e.outputs["3"]) == 1 and e.finished["4"] == "abort"
    assert counters.started == counters.stopped == 5 and not e.batch.requests


@EACH_WAY
def test_requests_decode_to_the_end_of_the_context(method: str, queue: int) -> None:
    e = engine(method, queue, tokens=16)
    ask(e, range(3), 10_000, 10_000)
    is_whole(e)
    assert [40 + i + len(e.outputs[str(i)]) for i in range(3)] == [512] * 3


@EACH_WAY
def test_a_policy_is_swapped_in_any_step(method: str, queue: int) -> None:
    e = engine(method, queue, tokens=16)
    ask(e, range(5), 120, 0)
    for version, policy in enumerate(itertools.cycle(swapped_policies())):
        if not e.scheduler.has_requests():
            break
        e.worker.router.policy = replace(policy, version=version)
        e.run(1)
    is_whole(e)


@EACH_WAY
def test_a_following_rank_trims_each_step_like_rank_0(method: str, queue: int) -> None:
    """Both in this process, with messages as they are sent; requests are preempted meanwhile, and
    go on where they were."""
    e = engine(method, queue, tokens=16, blocks=60)
    sent: list[Any] = []
    leads, follows = Ranks(0, 2), Ranks(1, 2)
    leads._broadcast = lambda tensor: sent.append(tensor.clone())  # type: ignore[method-assign]
    follows._broadcast = lambda tensor: tensor.copy_(sent.pop(0))  # type: ignore[method-assign]
    e.adapter.ranks = leads
    follower, batch = Adapter(None, 16, has_model=e.has_model, ranks=follows), Batch(e.batch.runner)
    work, cut = e._work, 0

    def both(out: Any) -> Any:
        nonlocal cut
        made = work(out)
        batch.begin(out)
        step = batch.trimmed(out)
        assert step.num_scheduled_tokens == e.batch.step.num_scheduled_tokens
        cut += out.total_num_scheduled_tokens - step.total_num_scheduled_tokens
        if made.req_ids:
            batch.commit(made.req_ids, made.sampled_token_ids)
            plan = follower.decide(len(made.req_ids), lambda: pytest.fail("it follows"))
            batch.chosen(made.req_ids, plan)
        assert batch.lengths == e.batch.lengths and not sent
        return made

    e._work = both  # type: ignore[method-assign]
    serve(e)
    is_whole(e)
    assert e.preemptions > 2 and bool(cut) == (queue > 1)
    assert [len(output) for output in e.outputs.values()] == [120] * 6


def test_a_captured_drafter_graph_stays_within_its_buffer() -> None:
    """vLLM captures as many passes as the longest draft has tokens; the device checks no bounds."""
    from decoder.engines.vllm.v2.speculators import HybridSpeculator

    drafter, steps, row = HybridSpeculator.__new__(HybridSpeculator), list[int](), torch.zeros(2)
    drafter.num_speculative_steps, drafter.idx_mapping = 4, row
    drafter.input_buffers = mock.Mock(positions=row, query_start_loc=row)
    drafter.current_draft_step = torch.tensor(0)
    drafter._generate_draft = lambda *_: steps.append(int(drafter.current_draft_step))
    drafter._generate_fused_drafts(1, 1, None, None, None, None, num_speculative_steps=64)
    drafter._generate_fused_drafts(1, 1, None, None, None, None, 3)
    assert steps == [1, 2, 3, 1, 2]


def test_a_failing_drafter_ends_the_process_of_one_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM would log it, and let that rank take its next step while the others wait in this one."""
    from decoder.engines.vllm.v2.runner import HybridRunner
    from decoder.engines.vllm.v2.speculators import HybridSpeculator

    def leave(status: int) -> None:
        raise SystemExit(status)

    class Broken:
        req_ids, num_reqs = ("a",), property(lambda _: 1 / 0)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    runner, drafter = (c.__new__(c) for c in (HybridRunner, HybridSpeculator))
    runner.adapter = Adapter(None, 8, has_model=True, ranks=Ranks(1, 2))
    drafter.chooser, drafter._longest, drafter.num_speculative_steps = runner, 8, 4
    with caplog.at_level("CRITICAL", "decoder"), pytest.raises(SystemExit):
        drafter.propose(Broken(), *[None] * 10)
    assert "rank 1 of 2 ends" in caplog.text and "ZeroDivisionError" in caplog.text


@dataclass
class Masks:
    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray
    num_acceptable_drafts: list[int] | None


@pytest.mark.parametrize("every_place", [False, True])
def test_grammar_masks_are_trimmed_with_the_step(every_place: bool) -> None:
    batch = Batch.__new__(Batch)
    batch.verified = {"a": 2, "c": 1, "d": 1}
    batch.placed = {"a": 4, "b": 4, "c": 4, "d": 4}
    rows = np.array([[f"{name}{i}"] for name in "abc" for i in range(5)])
    cut = batch.masked(Masks(["a", "b", "c"], rows, [1, 4, 3]), every_place)
    kept = ["a0", "a1", "a2", "b0", "c0", "c1"]
    assert cut.grammar_bitmask[:, 0].tolist() == (rows[:, 0].tolist() if every_place else kept)
    assert batch.verified == {"a": 1, "c": 1, "d": 1}
    assert batch.masked(None, every_place) is None


@pytest.mark.parametrize(
    ("support", "bound", "graph"),
    [("ALWAYS", None, "FULL"), ("UNIFORM_BATCH", 17, "FULL"), ("UNIFORM_BATCH", None, "PIECEWISE"),
     ("UNIFORM_BATCH", 9, "PIECEWISE"), ("NEVER", 17, "PIECEWISE")],
)  # fmt: skip
def test_steps_of_mixed_lengths_have_full_graphs_where_attention_supports_them(
    support: str, bound: int | None, graph: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """By vLLM's own choice of graphs, without a device."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu import cudagraph_utils

    from decoder.engines.vllm.v2.runner import HybridRunner

    monkeypatch.setattr(cudagraph_utils, "get_pp_group", mock.Mock())
    monkeypatch.setattr(cudagraph_utils, "current_platform", mock.Mock())
    settings = config("eagle3", tokens=16)
    object.__setattr__(settings.speculative_config, "enable_adaptive_verification", True)
    compilation = settings.compilation_config
    compilation.cudagraph_capture_sizes = [1, 2, 4, 8, 16, 32, 64]
    compilation.max_cudagraph_capture_size = 64
    group = mock.Mock(backend=AttentionCGSupport)
    builder = group.get_metadata_builder.return_value
    builder.get_cudagraph_support.return_value = AttentionCGSupport[support]
    builder.get_varlen_cudagraph_max_query_len.return_value = bound
    runner = HybridRunner.__new__(HybridRunner)
    runner.speculative_config, runner.attn_groups = settings.speculative_config, [[group]]
    runner.decode_query_len = 17
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    with caplog.at_level("INFO", "decoder"):
        graphs = runner.graphs(settings, torch.device("cpu"), mode, decode_query_len=17)
    graphs._graphs_captured = True
    found = graphs.dispatch(3, 1 + 3 + 9, None, 0, max_query_len=9)
    assert (found.cg_mode.name, found.num_tokens) == (graph, 16)
    assert ("run on full graphs" in caplog.text) == (graph == "FULL")


def served(folder: Path, method: str = "", ahead: bool | None = None) -> dict[str, Any]:
    """Everything asked of an engine in a process of its own: without a method plain vLLM's V1, and
    V1 with ours where ``ahead`` is None."""
    models = two_heads.write_models(folder, asked.VOCABULARY, 16, asked.JSON)
    job: dict[str, Any] = {"model": str(models[0]), "speculative_config": None}
    variables = {"HVD_WORKER_ENABLED": "0"}
    if method:
        given = {"model": str(models[1])} if method == "eagle3" else {}
        job["speculative_config"] = given | {"method": method, "num_speculative_tokens": 12}
        variables = {"HVD_WORKER_ENABLED": "1", "HVD_WORKER_FLOOR": "0"}
        if ahead is None:
            job["speculative_config"] |= ON_V1
        else:
            job["ahead"], variables = ahead, variables | interpreted.VARIABLES | SIDES
    made: dict[str, Any] = run_apart("tests.engines.asked", folder, job, **variables)
    return made | {"target": str(models[0])}


SIDES = {"HVD_WORKER_HOLDOUT": "0.9", "HVD_WORKER_VARIANTS": "plain,suffix"}
ON_V1 = {"disable_padded_drafter_batch": True, "disable_eagle_block_drop": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return served(tmp_path_factory.mktemp("plain"))


@pytest.fixture(
    scope="module", params=list(itertools.product(("eagle3", "suffix"), (True, False))), ids=str
)
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    method, ahead = request.param
    made = served(tmp_path_factory.mktemp("v2"), method, ahead)
    assert made["runner"] == [True, 1 + ahead]
    return made


@pytest.fixture(scope="module")
def on_v1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = served(tmp_path_factory.mktemp("v1"), "eagle3")
    assert made["runner"] == [False, 1]
    return made


@real
def test_answers_equal_plain_v1(plain: dict[str, Any], hybrid: dict[str, Any]) -> None:
    assert plain["answers"].keys() == {*hybrid["answers"], "thinking"}
    assert not unlike(plain, hybrid)


@real
def test_answers_of_v1_with_drafts_equal_plain_v1(
    plain: dict[str, Any], on_v1: dict[str, Any]
) -> None:
    assert plain["answers"].keys() == on_v1["answers"].keys()
    assert not unlike(plain, on_v1)
    status = on_v1["status"]
    assert status["faults"] == 0 and on_v1["left"] == 0 and on_v1["faults"] > 0
    assert status["requests_started"] == status["requests_stopped"] > 60
    assert all(status["accepted"].get(arm, 0) > 5 for arm in ("cache", "model")), status


def unlike(plain: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What was answered in another way, by kind."""
    return {
        kind: (plain["answers"][kind], answer)
        for kind, answer in other["answers"].items()
        if rounded(answer) != rounded(plain["answers"][kind])
    }


@real
def test_drafts_were_really_verified_and_counted(hybrid: dict[str, Any]) -> None:
    noted, status = hybrid["noted"], hybrid["status"]
    assert noted["longer"] == noted["no token"] == 0 and noted["preempted"] > 0
    assert 50 < noted["verified"] <= noted["chosen"]
    # what is placed behind a new request's prompt is taken out of vLLM's count by our scheduler,
    # which is there where steps are scheduled ahead
    begun = 0 if hybrid["runner"] == [True, 2] else noted["begun"]
    assert noted["verified"] * 0.8 <= hybrid["vllm drafted"] <= noted["verified"] + begun
    assert status["faults"] == 0 and hybrid["left"] == 0
    assert status["requests_started"] == status["requests_stopped"] > 60
    assert bool(hybrid["faults"]) == ("model" in status["cycles"]), "its passes were made to fail"
    assert {"plain", "suffix"} & {*hybrid["sides"]}


@real
def test_sampled_tokens_have_the_targets_distribution(
    hybrid: dict[str, Any],
) -> None:
    """Two sums that are normal with mean 0 and variance 1 if it is: how often the draft's token was
    drawn, and how probable what was drawn is. Both within 4.5: one false alarm in 73,000 tests."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(hybrid["target"]).eval()
    drawn = np.zeros((len(hybrid["sampled"]), 4))
    for row, (text, draft, token) in zip(drawn, hybrid["sampled"], strict=True):
        with torch.inference_mode():
            log = model(torch.tensor([text])).logits[0, -1].double().log_softmax(-1)
        p, mean = log.exp(), (log.exp() * log).sum()
        row[:] = float(token == draft) - p[draft], p[draft] * (1 - p[draft]), log[token] - mean, 0
        row[3] = (p * (log - mean) ** 2).sum()
    accepted, probable = (drawn[:, i].sum() / drawn[:, i + 1].sum() ** 0.5 for i in (0, 2))
    assert len(drawn) > 40 and abs(accepted) < 4.5 and abs(probable) < 4.5, (accepted, probable)


def rounded(answer: Any) -> Any:
    """The same, with log-probabilities as exact as they are."""
    if isinstance(answer, float):
        return round(answer, 3)
    if isinstance(answer, dict):
        return {key: rounded(value) for key, value in answer.items()}
    return [rounded(each) for each in answer] if isinstance(answer, list) else answer
