"""The two servers, and what 32 streams of a stock client find while policies come every second."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import openai

from decoder.contracts.bundle import CHAMPION, Policy, frequency_policy
from decoder.contracts.errors import BrokerError
from decoder.contracts.settings import KafkaSettings
from decoder.policy.first import first_policy
from learner.release.publisher import PolicyPublisher
from learner.topics import ensure_topics
from pipelines import embedded, machine
from pipelines.stack import broker, processes
from pipelines.stack.running import HVD
from tests.conftest import patience
from tests.decoder.telemetry.broker import start_broker
from tests.matrix.answers import Answer, answer, client_of, differences
from tests.matrix.asks import CONTEXT, Ask, everything, without_speculation
from tests.server import Server, serving

STREAMS: Final = 32
PUSH_EVERY_S: Final = 1.0
SIDES: Final = ("plain", "suffix", "model", "first")
"""They take turns with what is pushed."""
FLOAT32: Final = ("--dtype", "float32")
LIMITS: Final = (
    "--max-model-len", str(CONTEXT),
    "--max-num-seqs", str(STREAMS),
    # Room for the longest prompts of all streams at once: a seeded request whose prompt is read in
    # several steps draws other numbers, and ends plain vLLM on a CPU.
    "--max-num-batched-tokens", str(STREAMS * CONTEXT),
    "--enable-auto-tool-choice",
    "--tool-call-parser", "hermes",
)  # fmt: skip


def outline(found: Answer) -> Answer:
    """What of a sampled answer does not depend on what was drawn, where it may not end early."""
    ends = [choice["finish_reason"] for choice in found.get("choices", ())]
    return {"ends": ends, "usage": found.get("usage"), "refused": found.get("refused")}


LEFT_OUT: Final = ("leave", "ids", "edge")
NOT_IN_PIECES: Final = "prompt_logprobs"
"""A field that vLLM refuses in a request for a stream."""


def all_asks() -> list[Ask]:
    """Requests in one fixed order, with fields that a client of OpenAI's sends, or vLLM's own.

    Those that are not ``exact`` go on to their limit, so that only their tokens are drawn.
    """
    asked: list[Ask] = []
    for number, ask in enumerate(a for a in everything() if a.kind not in LEFT_OUT):
        if ask.exact or "ignore_eos" in ask.body:
            asked += _both_ways(ask)
        if "seed" in ask.body:
            alone = replace(without_speculation(ask), name=f"drawn-{number}", exact=True)
            asked += _both_ways(alone)
    return asked


def _both_ways(ask: Ask) -> list[Ask]:
    """Answered whole, and in pieces; but for what is refused: in pieces vLLM logs a traceback."""
    body = {k: v for k, v in ask.body.items() if k not in ("return_token_ids", "stream")}
    whole = replace(ask, body={**body, "stream": False})
    if NOT_IN_PIECES in body or ask.kind == "refused":
        return [whole]
    further = {"stream": True, "stream_options": {"include_usage": True}}
    return [whole, replace(ask, name=f"{ask.name}-in-pieces", body={**body, **further})]


@contextmanager
def stock(folder: Path) -> Iterator[Server]:
    """vLLM's own server, without anything of ours."""
    port, model = machine.free_port(), str(embedded.ensure_model())
    arguments = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--served-model-name", embedded.SERVED_NAME, "--port", str(port), "--enforce-eager"),
        *FLOAT32,
        *LIMITS,
    ]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HVD_")}
    environment = {**ours, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with serving(arguments, environment, port, folder / "stock.log") as server:
        yield server


@contextmanager
def hybrid(folder: Path) -> Iterator[tuple[Server, KafkaSettings]]:
    """A worker as ``hvd serve`` starts it, and the broker that brings it policies."""
    kafka_port, port = machine.free_port(), machine.free_port()
    kafka = broker.local(kafka_port)
    environment = os.environ | {
        broker.VARIABLE: kafka.bootstrap_servers,
        # What is pushed decides: the floor would relieve a policy that never or always drafts.
        "HVD_WORKER_FLOOR": "0",
        "HVD_WORKER_HOLDOUT": "0.3",
        "HVD_WORKER_VARIANTS": ",".join(SIDES),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    child = start_broker(kafka_port, folder / "broker", folder / "broker.log")
    try:
        with patience():
            ensure_topics(kafka, broker.EMBEDDED_LIMITS)
        arguments = [*HVD, "serve", "--port", str(port), *FLOAT32, "--", *LIMITS]
        with serving(arguments, environment, port, folder / "worker.log") as server:
            yield server, kafka
    finally:
        processes.stop([child])


def faults(ask: Ask, got: Answer, expected: Answer) -> list[str]:
    """What of an answer is not as expected; of a drawn one, what does not depend on the draw."""
    if not ask.exact:
        got, expected = outline(got), outline(expected)
    return [f"{ask.name}{what}" for what in differences(got, expected)]


def policies(scope: str) -> list[Policy]:
    """A network, counting, and what no learner would publish: always, never, no model draft."""
    survival = replace(first_policy(scope), role=CHAMPION)
    return [
        survival, frequency_policy(scope, 1.5), frequency_policy(scope, 0.0), survival,
        frequency_policy(scope, 4.0), frequency_policy(scope, 1e9),
        replace(frequency_policy(scope, 1e9), use_model=False),
    ]  # fmt: skip


@dataclass
class Found:
    """What the streams saw. ``pushed`` policies were acknowledged, the last as ``publication``."""

    answers: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    tried: int = 0
    pushed: int = 0
    publication: int = 0
    seconds: float = 0.0

    def row(self, applied: int) -> str:
        """A row of figures; ``applied`` is how many policies came into force."""
        rate = self.tokens / self.seconds
        return (
            f"| {self.seconds:.0f} s | {self.answers} | {len(self.failures)} | "
            f"{len(self.differences)} | {self.pushed} | {applied} | {rate:.0f} |"
        )


def under_load(
    url: str,
    kafka: KafkaSettings,
    scope: str,
    asks: Sequence[Ask],
    expected: dict[str, Answer],
    seconds: float,
) -> Found:
    """Ask every ask once, then at random until ``seconds`` are over, while policies are pushed."""
    found, numbers, draw = Found(), itertools.count(), random.Random(11)
    answered: list[int] = []  # tokens of each answer
    began = time.monotonic()

    def stream() -> None:
        while (number := next(numbers)) < len(asks) or time.monotonic() - began < seconds:
            ask = asks[number] if number < len(asks) else draw.choice(asks)
            try:
                got = answer(client, ask)
            except openai.APIConnectionError as error:
                got = {"refused": 0, "message": str(error)}
            if "refused" in got and "refused" not in expected[ask.name]:
                found.failures.append(f"{ask.name}: {got['message']}")
            else:
                found.differences.extend(faults(ask, got, expected[ask.name]))
                answered.append((got.get("usage") or {}).get("completion_tokens", 0))

    with (
        client_of(url) as client,
        closing(PolicyPublisher(kafka)) as publisher,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        streams = [pool.submit(stream) for _ in range(STREAMS)]
        for version, policy in enumerate(itertools.cycle(policies(scope)), 1):
            found.tried = version
            with suppress(BrokerError):  # one that no broker took, as far as is known
                sent = publisher.publish(replace(policy, version=version), term=1)
                found.pushed, found.publication = found.pushed + 1, sent.publication
            if not wait(streams, timeout=PUSH_EVERY_S).not_done:
                break
        for one in streams:
            one.result()
    found.answers, found.tokens = len(answered), sum(answered)
    found.seconds = time.monotonic() - began
    return found
