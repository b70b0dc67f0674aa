"""Whatever goes wrong in our part: what requests write stays the same, and faults are told once."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from decoder.engines.vllm.adapter import RESTARTS
from decoder.policy.rule import CACHE
from tests.engines.configs import config
from tests.engines.scheduled import VOCABULARY
from tests.engines.test_vllm_adapter import ask, copying, drafted, engine, is_whole, serve
from tests.events import KeepingLog

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


@pytest.mark.parametrize("deferring", [True, False])
def test_the_adapter_limits_what_the_router_proposes(deferring: bool) -> None:
    e = engine(config(tokens=3), deferring=deferring)
    router, choose = e.worker.router, e.worker.router.choose

    def rash(report: Any) -> Any:
        long = [VOCABULARY + 9 if i == 2 else 5 for i in range(40)]
        report.budget, report.unable, report.waiting = None, (), 0
        chosen = choose(report)
        chosen.rooms[:], chosen.drafts[:] = 99, 0
        chosen.lengths[chosen.arms == CACHE] = len(long)
        chosen.tokens = np.array([long], np.int32)
        return chosen

    router.choose = rash  # type: ignore[method-assign]
    serve(e)
    is_whole(e)
    assert e.longest_seen == 3


def test_a_failing_drafter_costs_the_step_its_model_drafts_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    e = engine(config(tokens=16))
    told, propose = drafted(e), e.drafter.propose
    failing, raised = [False], []

    def broken(**arguments: Any) -> Any:
        if failing[0] and arguments["num_speculative_tokens"]:
            raised.append(arguments["num_speculative_tokens"])
            raise RuntimeError("a kernel that is not there")
        return propose(**arguments)

    assert e.adapter.deferred is not None
    e.adapter.deferred._propose = broken
    ask(e, range(4), steps=15)
    before, failing[0] = len(told), True
    with caplog.at_level(logging.ERROR, "decoder"):
        e.run(20)
    failing[0], during = False, told[before:]
    after = len(told)
    ask(e, range(4, 8), steps=10_000)
    assert all(k == 0 for _, _, k in during) and any(k for _, _, k in told[:before])
    assert any(k for _, _, k in told[after:])
    assert e.worker.faults == len(raised) > 0, "each is counted"
    assert caplog.text.count("Traceback") == 1
    e.worker.faults = 0
    is_whole(e)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("ours")


@pytest.mark.parametrize("verb", ["start", "observe", "choose", "drafted", "flush", "stop"])
def test_no_exception_of_ours_reaches_vllm(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    e = engine(config(tokens=16))

    setattr(e.worker.router, verb, broken)
    with caplog.at_level(logging.ERROR, "decoder"):
        serve(e)
        e.ask("6", 46, 120)
        e.run(5)
        e.abort("6")
        e.run()
    for name, output in e.outputs.items():
        start = 40 + int(name)
        assert output == list(copying(name)[start : start + 120]) or name == "6"
    assert e.worker.faults > 3 and caplog.text.count("RuntimeError: ours") == 1


def test_a_fault_of_every_request_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    e = engine(config("suffix"))
    cache = e.worker.router.cache
    start, cache.grow = cache.start, broken  # type: ignore[method-assign]

    def full(*arguments: Any) -> int:
        row = start(*arguments)
        cache.pool.windows["grow_at"] = 0
        return row

    cache.start = full  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "decoder"):
        serve(e)
    for name, output in e.outputs.items():
        assert output == list(copying(name)[40 + int(name) :][:120])
    assert caplog.text.count("RuntimeError: ours") == 1
    assert sum(e.worker.router.counters.left_out.values()) == 6 * (1 + RESTARTS)


def test_a_dropped_request_is_restarted_with_its_whole_text_twice_at_most() -> None:
    e = engine(config("suffix"))
    e.ask("1", 41, 300)
    router = e.worker.router
    lost = []
    while e.scheduler.has_requests():
        e.run(6)
        if "1" in router and "1" in e.runner.requests:
            table, slot = router.requests.table, router.requests.slots["1"]
            length = int(table.requests["length"][slot])
            assert length == e.runner.requests["1"].num_tokens
            seen = table.requests["context"][slot].tolist()
            assert seen == list(copying("1")[length - 32 : length])
            table.requests["length"][slot] -= 1  # as a fault of ours might leave it
            lost.append(length)
    assert len(lost) == 1 + RESTARTS and router.counters.left_out == {"length": 3}
    assert e.outputs["1"] == list(copying("1")[41 : 41 + 300]) and e.worker.faults == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_request", object()),
        ("prompt_embeds", object()),
        ("prompt_is_token_ids", [True]),
        ("prompt_token_ids", None),
    ],
)
def test_requests_without_text_or_policy_are_served_without_drafts(field: str, value: Any) -> None:
    e = engine(config("suffix"))
    e.worker.router.requests.sink = sink = KeepingLog()
    propose = e.propose

    def other(*arguments: Any) -> Any:
        state = e.runner.requests.get("1")
        if state is None:
            return propose(*arguments)
        real = getattr(state, field)
        setattr(state, field, value)
        try:
            return propose(*arguments)
        finally:
            setattr(state, field, real)

    e.propose = other
    serve(e, requests=2)
    is_whole(e)
    assert e.worker.router.counters.started == 1 and e.longest_seen > 0
    assert {v for n, _, v in e.told if n == "1"} == {0}
    assert {event.batch_size for event in sink.events} == {2}, "they are in the step all the same"


def test_a_disabled_adapter_drafts_and_reports_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    e = engine(config(tokens=16))
    ask(e, range(4))
    reported = len(e.ring)
    assert e.longest_seen
    closed: list[int] = []
    real = e.worker.close
    monkeypatch.setattr(e.worker, "close", lambda: closed.append(real() or 1))  # type: ignore[func-returns-value]
    e.adapter.disable("the weights are others")
    assert closed == [1], "nor does it say any more whom it serves"
    after = len(e.ring)
    e.longest_seen, passes = 0, e.drafter.passes
    e.run()
    is_whole(e)
    assert e.longest_seen == 0 and e.drafter.passes == passes
    assert len(e.ring) == after >= reported
    assert e.worker.router.counters.started == e.worker.router.counters.stopped == 4
    e.adapter.close()
    assert closed == [1]
