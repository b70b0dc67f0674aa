"""Clients that find no broker, and what is left of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from decoder.contracts.settings import KafkaSettings
from decoder.kafka import clients
from pipelines.machine import free_port
from tests.conftest import swept


def handles() -> int:
    swept()
    return psutil.Process().num_fds()


@pytest.mark.parametrize(
    "opened",
    [
        lambda kafka: clients.open_consumer(kafka, "test", bootstrap_timeout_ms=200),
        lambda kafka: clients.open_producer(kafka, "test", bootstrap_timeout_ms=200),
        lambda kafka: clients.open_admin(kafka, "test", 200),
    ],
)
def test_a_client_that_finds_no_broker_leaves_no_thread_and_no_handle(
    opened: Callable[[KafkaSettings], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="kafka")  # a record kept here keeps what it speaks of
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    threads, before = set(threading.enumerate()), handles()
    for _ in range(3):
        with pytest.raises(clients.AWAY):
            opened(kafka)
    assert set(threading.enumerate()) <= threads
    assert handles() <= before


def test_batches_are_summed_up_in_c() -> None:
    """In Python a full record of events takes 11 ms of the interpreter, in C 3 us."""
    from kafka.record import _crc32c, util

    assert util.crc32c_c is not None
    assert util.calc_crc32c(b"123456789") == _crc32c.crc(b"123456789") == 0xE3069283


def test_a_request_that_is_half_written_keeps_no_socket(kafka: KafkaSettings) -> None:
    """The client leaves a socket open to be written to the end, and then writes no more."""
    before = handles()
    consumer = clients.open_consumer(kafka, "test")
    consumer.topics()
    links = [each.transport for each in consumer._client._manager._conns.values()]
    for link in links:
        link._write_buffer.append(b"half of one")
    clients.close(consumer)
    assert links and handles() <= before
