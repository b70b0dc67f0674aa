"""What end-to-end tests share: asking the API, and reading what the service says on its topics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from decoder.contracts.events import decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus, decode_status
from decoder.contracts.topics import DRAFTS, STATUS
from decoder.scope_id import scope_of
from pipelines.embedded import DRAFTER, ensure_model
from tests.events import DraftEvent, events_of

PATIENCE_S = 600.0


@dataclass(frozen=True)
class Answer:
    """What the API returned for one request, as token ids."""

    prompt: list[int]
    output: list[int]


@dataclass
class Reader:
    """Reads what the stack says on its topics, from their beginning."""

    kafka: KafkaSettings
    events: list[DraftEvent] = field(default_factory=list)
    workers: list[WorkerStatus] = field(default_factory=list)
    learners: list[LearnerStatus] = field(default_factory=list)
    _known: set[tuple[str, int]] = field(default_factory=set)
    _consumer: Any = None

    def read(self) -> None:
        from kafka import KafkaConsumer

        if self._consumer is None:
            self._consumer = KafkaConsumer(
                DRAFTS.name, STATUS.name, auto_offset_reset="earliest",
                **self.kafka.client_options(),
            )  # fmt: skip
        for records in self._consumer.poll(timeout_ms=500).values():
            for record in records:
                if record.topic == DRAFTS.name:
                    batch = decode_batch(record.value)
                    if (named := (batch.origin.life, batch.sequence)) not in self._known:
                        self.events += events_of(batch)
                    self._known.add(named)  # it lies there again where an answer was lost
                else:
                    status = decode_status(record.value)
                    of_worker = isinstance(status, WorkerStatus)
                    (self.workers if of_worker else self.learners).append(status)  # type: ignore[arg-type]

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, (
                f"waited in vain for {what}; {self.workers[-1:]} {self.learners[-1:]}"
            )
            self.read()

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


def ask(
    api: str, model: str, messages: list[dict[str, str]], max_tokens: int, **further: Any
) -> Answer:
    """Ask greedily; ``further`` are fields of the request."""
    response = httpx.post(
        f"{api}/v1/chat/completions",
        json={
            "model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens,
            "return_token_ids": True, **further,
        },
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert response.is_success, response.text
    body = response.json()
    return Answer(body["prompt_token_ids"], body["choices"][0]["token_ids"])


def embedded_scope() -> str:
    """Scope of the embedded target with the shipped drafter."""
    return scope_of(str(ensure_model()), str(DRAFTER))
