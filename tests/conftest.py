"""Small real things for tests: a policy that learned nothing, a sink that keeps its events."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

with warnings.catch_warnings():
    # importing kafka-python warns about what it imports, which is theirs to mend
    warnings.simplefilter("ignore")
    from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from decoder.contracts.bundle import OUTPUTS, Kind, Policy
from decoder.contracts.features import NUM_FEATURES, TOKEN_CLASSES
from decoder.contracts.settings import KafkaSettings
from decoder.kafka.clients import Network
from learner.proxies import exempt
from learner.status import BRIEF
from pipelines.stack.running import SERVER_OPTIONS

VOCABULARY = 32

for each in (KafkaAdminClient, KafkaConsumer, KafkaProducer):  # those that tests open themselves
    each.DEFAULT_CONFIG["kafka_client"] = Network

settings.register_profile(  # a busy machine is no fault of a property
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


def pytest_sessionstart() -> None:
    """A shell's background job ignores Ctrl-C, and so would all that the tests interrupt. Its
    proxies and its options of MLflow are not for the servers that tests start."""
    exempt(os.environ)
    for name, value in [*os.environ.items()]:
        if name.startswith(SERVER_OPTIONS) or value.startswith("socks"):
            del os.environ[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # of the million objects of torch, vLLM and MLflow none is garbage


LONGEST = (
    "engines/test_contract.py", "pipelines/lab/bench/test_gpu.py",
    "learner/release/test_rollouts.py", "pipelines/lab/drafter/test_training.py",
    "packaging/test_build.py",
    "pipelines/serve/test_command.py", "pipelines/lab/replay/test_rules.py",
    "pipelines/lab/replay/test_command.py", "pipelines/telemetry/test_export.py",
    "decoder/test_compiled.py", "pipelines/lab/drift/test_drift.py",
    "pipelines/watch/test_page.py", "decoder/telemetry/test_supervisor.py",
    "learner/release/test_meanwhile.py", "packaging/test_dependencies.py",
    "engines/test_vllm_prefill.py",
    "pipelines/policy/test_policy.py", "pipelines/lab/bench/serve/test_run.py",
    "pipelines/lab/bench/test_cli.py", "learner/test_loop.py", "learner/evaluation/test_power.py",
    "pipelines/stack/test_supervision.py",
)  # fmt: skip
"""Files that begin first: one that began last would keep all testers but its own waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the others stay in their order."""
    rank = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    swept()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def swept() -> None:
    """Collect what is left behind, sockets among it; what is not is looked through by no later
    collection: with all modules each would take half a second."""
    gc.collect()
    gc.freeze()


PATIENCE_S = 60
PATIENT = (
    "decoder.kafka.clients.CONNECT_MS", "decoder.kafka.clients.CLOSE_S",
    "decoder.kafka.compacted.REQUEST_MS",
    "learner.intake.DELIVERY_MS", "learner.ingest.workers.PATIENCE_SECONDS",
    "learner.topics.REQUEST_MS", "learner.release.publish.ACK_SECONDS",
    "decoder.feed.CLOSE_TIMEOUT_S", "decoder.telemetry.supervisor.CLOSE_TIMEOUT_S",
    "decoder.telemetry.supervisor.START_TIMEOUT_S", "decoder.telemetry.supervisor.GRACE_S",
)  # fmt: skip


@contextmanager
def patience() -> Iterator[None]:
    """Whoever speaks to a broker that is there waits for it, though it stands still for seconds."""
    with pytest.MonkeyPatch.context() as patched:
        for place in PATIENT:
            patched.setattr(place, PATIENCE_S * (1_000 if place.endswith("_MS") else 1))
        for name in BRIEF.keys() - {"acks"}:
            patched.setitem(BRIEF, name, PATIENCE_S * 1_000)
        yield


@pytest.fixture
def token_classes() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.random((VOCABULARY, len(TOKEN_CLASSES))) < 0.3).astype(np.float32)


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[KafkaSettings]:
    """A real broker with the project's topics, empty."""
    from tests.decoder.telemetry.broker import running  # late: most tests need no broker

    with running(tmp_path) as reached:
        yield reached


def until(
    condition: Callable[[], object],
    what: object = "it to come true",
    seconds: float = 300.0,
    turn: Callable[[], object] = lambda: None,
    pause: float = 0.02,
) -> None:
    """Wait for ``condition``; ``turn`` is called, and time taken, between two looks at it. ``what``
    is reported where that is in vain, after longer than the slowest machine takes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        turn()
        time.sleep(pause)


def random_policy(
    seed: int = 0, scope: str = "scope", version: int = 1, kind: Kind = "payoff",
    hidden: Sequence[int] = (256, 256),
) -> Policy:  # fmt: skip
    """A policy with random weights, of the paper's shape unless told otherwise, carrying probes."""
    rng = np.random.default_rng(seed)
    layers = tuple(
        ((rng.normal(size=s) / np.sqrt(s[0])).astype(np.float32), np.full(s[1], 0.1, np.float32))
        for s in pairwise((NUM_FEATURES, *hidden, OUTPUTS[kind]))
    )
    policy = Policy(scope=scope, version=version, threshold=1.5, kind=kind, layers=layers)
    return policy.with_probes(rng.random((20, NUM_FEATURES)).astype(np.float32) * 8)


def naive_accepted_length(draft: Sequence[int], continuation: Sequence[int]) -> int:
    """Longest common prefix, the definition itself, which labels are tested against."""
    length = 0
    for proposed, committed in zip(draft, continuation, strict=False):
        if proposed != committed:
            break
        length += 1
    return length
