"""Service in bfloat16, as ``auto`` serves on a processor that is fast in it, wherever this runs.

What may differ: the tokens. In bfloat16 a batch of another shape rounds otherwise, two tokens that
are nearly as probable may change places, and an answer goes on from there another way. So the same
question may be answered differently in another company, with speculation and without, and nothing
here compares two answers.

What may not: every request gets what it asked for; each token is one that the target itself, read
in float32, finds within ``MARGIN`` of its most probable; labels and counters tell what happened.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.settings import KafkaSettings
from decoder.policy.probes import to_bytes
from learner.topics import make_right
from pipelines import embedded, machine
from pipelines.stack import broker, processes
from pipelines.stack.running import HVD
from pipelines.workloads import prompts
from tests.decoder.telemetry.broker import start_broker
from tests.end_to_end.service import Answer, Reader, ask, embedded_scope
from tests.server import Server, serving

pytestmark = [
    pytest.mark.long,
    pytest.mark.engine,
    pytest.mark.stack,
    pytest.mark.timeout(900),
]

MAX_TOKENS = 48
EACH = 2
KINDS = ("edits", "tools", "qa", "chat")
TOGETHER = 4
"""Requests at a time: the shape of a batch changes from step to step."""
MARGIN = 1.0
"""Logits. The worst of twelve such answers fell 0.2 short, by rounding alone."""


@dataclass(frozen=True)
class Service:
    """What was served: answers by the name each travelled by in the telemetry."""

    answers: dict[str, Answer]
    reader: Reader
    server: Server


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("bfloat16")
    kafka_port, port = machine.free_port(), machine.free_port()
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{kafka_port}")
    policy = folder / "counting.safetensors"
    policy.write_bytes(to_bytes(frequency_policy(embedded_scope(), 1.5)))
    environment = os.environ | {
        machine.FLAGS_VARIABLE: "avx2 avx512_bf16",
        broker.VARIABLE: kafka.bootstrap_servers,
        "HVD_WORKER_NAME": "bfloat16",
        # Counting decides, and alone, so that both arms are verified often.
        "HVD_WORKER_POLICY_FILE": str(policy),
        "HVD_WORKER_FLOOR": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    arguments = [*HVD, "serve", "--port", str(port), "--", "--max-model-len", "1024"]
    child = start_broker(kafka_port, folder / "broker", folder / "broker.log")
    reader = Reader(kafka)
    try:
        make_right(kafka)
        with serving(
            [*arguments, "--max-num-seqs", str(TOGETHER)], environment, port, folder / "worker.log"
        ) as server:
            yield Service(served(server, reader), reader, server)
    finally:
        reader.close()
        processes.stop([child])


def served(server: Server, reader: Reader) -> dict[str, Answer]:
    """Answers to all prompts, once the telemetry has told of every one of them."""
    asked = [p for kind in KINDS for p in itertools.islice(prompts(kind), EACH)]

    def answer(index: int) -> Answer:
        return ask(
            server.url, embedded.SERVED_NAME, list(asked[index].messages), MAX_TOKENS,
            ignore_eos=True, vllm_xargs={"hvd_workload": f"{asked[index].dataset}-{index}"},
        )  # fmt: skip

    with ThreadPoolExecutor(TOGETHER) as pool:
        answers = list(pool.map(answer, range(len(asked))))
    reader.until("the worker's status", lambda: bool(reader.workers))
    reader.until("every label", lambda: reader.workers[-1].requests_stopped == len(asked))
    reader.until("every event", lambda: len(reader.events) == reader.workers[-1].events_made)
    return {f"{p.dataset}-{i}": a for i, (p, a) in enumerate(zip(asked, answers, strict=True))}


def test_auto_serves_in_bfloat16_here(service: Service) -> None:
    assert "dtype=torch.bfloat16" in service.server.log()


def test_every_request_gets_what_it_asked_for(service: Service) -> None:
    assert len(service.answers) == EACH * len(KINDS)
    for name, answer in service.answers.items():
        assert len(answer.output) == MAX_TOKENS, name


def test_every_token_is_one_the_target_allows(service: Service) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded.ensure_model(), dtype=torch.float32)
    missed = {}
    with torch.inference_mode():
        for name, answer in service.answers.items():
            ids = torch.tensor([answer.prompt + answer.output[:-1]])
            logits = model(ids, logits_to_keep=len(answer.output)).logits[0]
            said = logits.gather(1, torch.tensor(answer.output)[:, None])[:, 0]
            missed[name] = float((logits.max(-1).values - said).max())
    assert max(missed.values()) <= MARGIN, missed


def test_both_arms_were_verified_and_nothing_failed(service: Service) -> None:
    worker = service.reader.workers[-1]
    assert worker.faults == worker.events_dropped == worker.events_failed == 0
    assert all(worker.cycles.get(arm, 0) > 0 for arm in ("cache", "model")), worker.cycles
    assert all(worker.accepted.get(arm, 0) > 0 for arm in ("cache", "model")), worker.accepted


def test_counters_agree_with_the_answers(service: Service) -> None:
    worker = service.reader.workers[-1]
    tokens = sum(len(a.output) for a in service.answers.values())
    assert worker.requests_started == worker.requests_stopped == len(service.answers)
    assert worker.tokens == tokens
    assert service.server.metric("vllm:generation_tokens_total") == tokens


def test_events_are_told_once_and_fit_the_answers(service: Service) -> None:
    events = service.reader.events
    assert service.reader.workers[-1].events_unaccounted == 0
    assert sorted(e.number for e in events) == list(range(len(events)))
    places = Counter((e.workload, e.position) for e in events)
    assert set(places.values()) == {1}
    drafts = [e for e in events if e.draft_len]
    assert len(drafts) == service.reader.workers[-1].drafts_labelled > 0
    for event in drafts:
        output = service.answers[event.workload].output
        assert 0 <= event.accepted <= event.draft_len
        assert 1 <= event.position <= event.position + event.accepted <= len(output)
        assert event.features is not None and np.isfinite(event.features).all()
    assert all(e.arm == "cache" for e in events if e.label == "verified")
