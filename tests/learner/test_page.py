"""The learner's page, asked over HTTP while it runs against a real broker and registry."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import KafkaSettings
from learner.loop import run
from learner.page import STUCK_SECONDS, Health, serve_page
from learner.release.registry import Registry
from learner.settings import LearnerSettings
from pipelines.machine import free_port
from tests.conftest import until
from tests.learner.conftest import Broker
from tests.learner.stage import WARNINGS
from tests.learner.stream import SCOPE, batches, produce, settings_in
from tests.learner.traffic import Traffic

pytestmark = WARNINGS
EVENTS = Traffic(seed=9).events(40)


def ask(port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=300.0)


def series(page: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("hvd_learner_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@contextmanager
def running(settings: LearnerSettings, kafka: KafkaSettings) -> Iterator[int]:
    """The whole learner in a thread, with its page; the port."""
    assert settings.port is not None
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(settings, kafka, stop))
    thread.start()
    try:
        yield settings.port
    finally:
        stop.set()
        thread.join()


def test_a_learner_without_a_broker_is_healthy_and_not_ready(
    registry: Registry, tmp_path: Path
) -> None:
    settings = settings_in(tmp_path, registry, port=free_port())
    nobody = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    with running(settings, nobody) as port:
        until(lambda: _answers(port), "the page")
        assert ask(port, "/health").status_code == 200
        ready = ask(port, "/ready")
        assert ready.status_code == 503 and "broker" in ready.text
    assert settings.store_path.exists(), "it ends when it is told, and saves"


def _answers(port: int) -> bool:
    try:
        return ask(port, "/health").is_success
    except httpx.TransportError:
        return False


def test_a_caught_up_learner_is_ready_and_serves_metrics(
    broker: Broker, registry: Registry, tmp_path: Path
) -> None:
    produce(broker.kafka, [*batches(EVENTS), b"not json"])
    settings = settings_in(tmp_path, registry, port=free_port())
    with running(settings, broker.kafka) as port:
        until(lambda: _answers(port) and ask(port, "/ready").is_success, "readiness")
        found: dict[tuple[str, ...], float] = {}
        wanted = {
            ("events_consumed_total", SCOPE): len(EVENTS), ("holds_lease", SCOPE): 1,
            ("records_refused_total", "malformed"): 1, ("lag",): 0,
        }  # fmt: skip

        def is_told() -> bool:
            found.update(series(ask(port, "/metrics").text))
            return wanted.items() <= found.items()

        until(is_told, "the events and the lease")
        assert ask(port, "/anything").status_code == 404
    whole = [e for e in EVENTS if e.draft_len and not e.censored]
    assert found["accepted_tokens_total", SCOPE] == sum(e.accepted for e in whole)
    foreseen = sum(e.predicted for e in whole)
    assert found["predicted_tokens_total", SCOPE] == pytest.approx(foreseen)
    assert found["lag_seconds",] == found["lag_events",] == 0
    assert found["process_resident_memory_bytes",] > 0


def test_a_stuck_loop_is_unhealthy() -> None:
    health = Health()
    assert not health.unhealthy  # what waits for a broker does not stand still
    health.record_turn(ready=True)
    assert not health.unhealthy and not health.unready
    health.record_turn(ready=False)
    assert not health.unready  # once is enough
    health.turned_at = time.monotonic() - STUCK_SECONDS - 1
    settings = LearnerSettings(port=0)
    with serve_page(settings, health) as port:
        assert port is not None
        assert ask(port, "/health").status_code == ask(port, "/ready").status_code == 503


def test_silent_and_impatient_clients_block_nothing_and_leave_no_tracebacks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with serve_page(LearnerSettings(port=0), Health()) as port:
        assert port is not None
        with socket.create_connection(("127.0.0.1", port)):
            assert ask(port, "/health").is_success
        for _ in range(20):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        for _ in range(3):
            assert ask(port, "/metrics").is_success
    assert "Traceback" not in capfd.readouterr().err


def test_a_taken_port_is_reported_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with (
            pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{number}.*_PORT"),
            serve_page(LearnerSettings(port=number), Health()),
        ):
            pass
