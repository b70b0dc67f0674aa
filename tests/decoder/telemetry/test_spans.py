"""Spans arrive, by vLLM's own tracer, at a receiver that speaks OTLP; without one none is made."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.settings import KafkaSettings
from decoder.requests import Committed, RequestOptions
from decoder.settings import WorkerSettings
from decoder.telemetry.spans import ENDED, ENDPOINT_VARIABLE, Spans
from decoder.traced import Ended, Traced, parent_of
from decoder.worker import make_worker
from tests.decoder.simulated import fixed, make_router
from tests.otlp import receiving

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"

WORKER = """
import sys
import numpy as np
from vllm.tracing import maybe_init_worker_tracer
maybe_init_worker_tracer("vllm.engine_core", "engine_core", "EngineCore")  # as vLLM does
from decoder.contracts.settings import KafkaSettings
from decoder.requests import Committed, RequestOptions
from decoder.requests import RequestOptions
from decoder.settings import WorkerSettings
from decoder.worker import make_worker
from tests.decoder.test_router import Target
settings = WorkerSettings(name="w", metrics=False, telemetry=False, floor=False, holdout=0.0)
classes = np.zeros((64, 6), np.float32)
worker = make_worker(settings, KafkaSettings(), "scope", classes, False)
for name, trace in (("one", sys.argv[1]), ("two", ""), ("three", sys.argv[2])):
    asked = RequestOptions(60, 4096, opaque="p" + name, tenant="secret", trace=trace, choice=2)
    Target(worker.router, [1, 2, 3] * 15 + list(range(4, 19))).run(name, [1, 2, 3], asked)
print(worker.status().cycles, worker.status().accepted)
worker.close()
"""


def run(endpoint: str) -> str:
    environment = {
        **os.environ,
        ENDPOINT_VARIABLE: endpoint,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }
    unsampled = f"00-{TRACE}-{SPAN}-00"
    return subprocess.run(
        [sys.executable, "-c", WORKER, PARENT, unsampled],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_a_request_that_came_with_a_trace_has_one_span_in_it() -> None:
    with receiving() as (endpoint, spans):
        said = run(endpoint)
    (span,) = spans  # the second had no trace, and its caller does not sample the third
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (
        TRACE,
        SPAN,
        "hvd.decode",
    )
    assert 0 < span.start_time_unix_nano < span.end_time_unix_nano
    told = {each.key: value_of(each.value) for each in span.attributes}
    assert (told["hvd.request"], told["hvd.choice"], told["hvd.worker"]) == ("pone", 2, "w")
    assert told["hvd.ended"] == "length" and told["hvd.decision_us_mean"] > 0
    assert told["hvd.cycles.cache"] > 0 and told["hvd.cycles.model"] == 0
    assert told["hvd.drafted.cache"] >= told["hvd.accepted.cache"] > 10
    assert "secret" not in str(span) and said


def value_of(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def test_without_an_endpoint_there_is_no_thread_and_nothing_is_added_up(
    monkeypatch: pytest.MonkeyPatch, token_classes: np.ndarray
) -> None:
    monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
    settings = WorkerSettings(name="w", metrics=False, telemetry=False)
    worker = make_worker(settings, KafkaSettings(), "scope", token_classes, has_model=False)
    assert worker.spans is None and worker.router.followed.end is None
    worker.close()


def test_too_many_at_once_are_left_out_and_never_waited_for() -> None:
    spans = Spans("w")
    for _ in range(ENDED + 5):
        spans.put(Ended(PARENT, "p", 0, Traced(1.0), 2.0, "stop"))
    assert (len(spans._queue), spans._queue.dropped) == (ENDED, 5)


@pytest.mark.parametrize(
    "given",
    [
        None,
        7,
        "",
        PARENT.upper(),
        PARENT + "-more",
        f" {PARENT}",
        f"{PARENT}\n",
        PARENT[:-1],
        ["x"],
    ],
)
def test_what_is_no_traceparent_is_none(given: Any) -> None:
    assert parent_of(given) == "" and parent_of(PARENT) == PARENT


def test_a_span_begins_with_the_first_token_and_not_with_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, has_model = fixed("none")
    router, ended, now = make_router(policy, has_model, floor=False), list[Ended](), [10.0]
    router.followed.end = ended.append
    monkeypatch.setattr("decoder.followed.time.time", lambda: now[0])
    router.start("r", np.array([1, 2, 3], np.int32), RequestOptions(9, 99, trace=PARENT))
    for now[0] in (20.0, 30.0):  # a prompt read meanwhile
        router.observe([Committed("r", [4], 0)], 1)
    router.stop("r", "abort")
    assert [(e.traced.began, e.at) for e in ended] == [(20.0, 30.0)]


def test_the_sums_are_of_all_cycles_and_the_policy_of_the_last() -> None:
    traced, policy = Traced(1.0), frequency_policy("s")
    traced.add("cache", 8, 5, 100.0, None)
    traced.add("cache", 4, 4, 50.0, policy)
    traced.add("none", 0, 0, 30.0, policy)
    assert traced.cycles == {"cache": 2, "none": 1} and traced.drafted["cache"] == 12
    assert traced.accepted["cache"] == 9 and traced.decided_us == 180.0
    assert (traced.version, traced.publication) == (policy.version, policy.publication)
