"""What telemetry costs the decoding thread, and the machine: a worker that makes 10,000 events a
second.

A thread emits the events of a step of 64 requests as the router does, so many times a second as
such a worker steps. The events go through the ring and the carrier to a real broker, and are read
back and counted.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import zstandard

from decoder.contracts.events import Origin, decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus
from decoder.contracts.topics import DRAFTS
from decoder.core.cycles import settle
from decoder.core.events import Sink
from decoder.core.guards.floor import Floor
from decoder.core.table import FREE, UNSETTLED, new_table
from decoder.policy.pricing import NOMINAL
from decoder.telemetry.handover import Handover
from decoder.telemetry.ring import HEAD, SETTLED, SPELLED, Ring
from pipelines import machine
from pipelines.lab.bench.step_cost import BATCH, recorded
from pipelines.stack import broker, processes
from pipelines.telemetry.reading import reading, records, spans

STEPS: Final = 64
"""Steps that are really made; they are emitted again and again."""
QUEUE: Final = 65_536
DRAIN_S: Final = 30.0


def measure(rate: float, seconds: float, progress: Callable[[float], None]) -> dict[str, Any]:
    """Emit ``rate`` events a second for ``seconds``; ``progress`` is told how many have passed.

    Starts a broker, unless the environment names one.

    Returns:
        for ``--json``. ``emit_us`` and ``hand_over_us`` are what an event costs under the
        interpreter's lock: in the decoding thread, ``p99_emit_us`` in one step of a hundred, and in
        the one that hands over; ``interpreter_percent`` is their part of a second at that rate, the
        most of it that decoding can lose. ``carrier_us`` is processor time of the other process,
        ``processor_us`` the sum. Bytes are compressed, as they travel.

    Raises:
        BrokerError: there is none.
    """
    with _kafka() as kafka:
        return _measure(kafka, rate, seconds, progress)


@contextmanager
def _kafka() -> Iterator[KafkaSettings]:
    if broker.is_external():
        yield KafkaSettings.load()
        return
    with tempfile.TemporaryDirectory() as root:
        port, children = machine.free_port(), dict[str, processes.Child]()
        part = broker.broker_part(port, Path(root) / "data", Path(root) / "broker.log")
        try:
            child = processes.begin(part, children)
            processes.wait_until(child, part.is_ready, part.patience_s)
            yield broker.local(port)
        finally:
            processes.stop([*children.values()])


def _measure(
    kafka: KafkaSettings, rate: float, seconds: float, progress: Callable[[float], None]
) -> dict[str, Any]:
    ring, emitting = Ring(QUEUE), list[float]()
    emit = emitter(ring)
    origin = Origin("bench", "bench", f"{time.time_ns():016x}"[-16:])

    def status() -> WorkerStatus:
        made = handover.accounts().made
        return WorkerStatus(process="bench", scope="bench", time=time.time(), events_made=made)

    handover = Handover(kafka, ring, origin, status)
    with reading(kafka, "bench") as consumer:
        before = spans(consumer, DRAFTS)
    handover.start()
    _until(lambda: handover.accounts().sent > 0, emit)
    assert handover.pid is not None
    carrier = psutil.Process(handover.pid)
    queued, handing = int(ring.control[HEAD]), handover.processor_s
    carrying = sum(carrier.cpu_times()[:2])
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        progress(passed)
        time.sleep(max(0.0, len(emitting) * BATCH / rate - passed))
        emitted = time.thread_time()
        emit()
        emitting.append(time.thread_time() - emitted)
    _until(lambda: not handover.accounts().waiting, lambda: time.sleep(0.05))
    events = int(ring.control[HEAD]) - queued
    carrying, handing = sum(carrier.cpu_times()[:2]) - carrying, handover.processor_s - handing
    handover.close()
    accounts = handover.accounts()
    delivered, size = _read(kafka, before, origin.life)
    locked = [1e6 * spent / events for spent in (sum(emitting), handing)]
    carrier_us = 1e6 * carrying / events
    return {
        "events_per_s": events / passed,
        "p99_emit_us": float(np.percentile(emitting, 99)) / BATCH * 1e6,
        "emit_us": locked[0],
        "hand_over_us": locked[1],
        "interpreter_percent": 100.0 * sum(locked) * rate / 1e6,
        "carrier_us": carrier_us,
        "processor_us": sum(locked) + carrier_us,
        "bytes_per_event": size / max(delivered, 1),
        "events": accounts.made,
        "delivered": delivered,
        "dropped": accounts.made - accounts.sent,
        "machine": machine.description(),
    }


def emitter(ring: Ring) -> Callable[[], None]:
    """What puts the events of a next step of 64 requests into ``ring``, as the router does."""
    rows, sink, floor = recorded(STEPS * BATCH), Sink(ring), Floor(has_model=True)
    table, number = new_table(1, BATCH, 1), itertools.count()
    for column in SPELLED:  # the same words have other numbers in another ring
        rows[column] = sink.word("")
    costs = NOMINAL.draft_us, NOMINAL.draft_token_us, NOMINAL.draft_row_us

    def emit() -> None:
        at = next(number) % STEPS * BATCH
        table.rows[:] = rows[at : at + BATCH]
        table.unsettled[:] = np.arange(BATCH)
        table.counts[UNSETTLED], table.counts[FREE] = BATCH, 0
        sink.control[HEAD] = settle(
            table, floor.needed, floor.ahead, floor.state, False, NOMINAL.dense, costs, sink.raw,
            sink.control, int(sink.control[SETTLED]), sink.words,
        )  # fmt: skip

    return emit


def _until(done: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    deadline = time.monotonic() + DRAIN_S
    while not done() and time.monotonic() < deadline:
        meanwhile()
        time.sleep(0.05)


def _read(kafka: KafkaSettings, before: dict[int, range], life: str) -> tuple[int, int]:
    """Distinct events of ``life`` behind those of ``before``, and their bytes.

    Raises:
        BrokerError: they do not come.
    """
    numbers, size, squeeze = set[int](), 0, zstandard.ZstdCompressor()
    with reading(kafka, "bench") as consumer:
        wanted = {p: range(before[p].stop, s.stop) for p, s in spans(consumer, DRAFTS).items()}
        for record in itertools.chain.from_iterable(records(consumer, DRAFTS, wanted)):
            batch = decode_batch(record.value)
            if batch.origin.life == life:
                numbers.update(batch.numbers["number"].tolist())
                size += len(squeeze.compress(record.value))
    return len(numbers), size
