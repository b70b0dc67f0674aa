"""What telemetry costs the decoding thread, and the machine: a worker that makes 10,000 events a
second.

A thread does work of the router's kind, featurizing and choosing for 64 requests, for as long as a
step of such a worker takes, and then emits the step's events as the router does. Stretches with and
without events take turns, so that what else the machine does falls on both; a stretch's beginning,
in which the last one's events are still handed over, is left out. The events go through the queue,
the hand-over and the carrier to a real broker, and are read back and counted.
"""

from __future__ import annotations

import itertools
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import zstandard

from decoder.contracts.events import Origin, decode_batch
from decoder.contracts.features import NUM_FEATURES
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus
from decoder.contracts.topics import DRAFTS
from decoder.hindsight import tell
from decoder.kafka.clients import open_consumer, places_of
from decoder.labels import Label
from decoder.policy.first import first_policy
from decoder.requests import Cycle, RequestOptions, Step
from decoder.telemetry.handover import Handover
from decoder.telemetry.queue import EventQueue
from pipelines import machine
from pipelines.bench.decide import BATCH, MODEL_LEN, decide, random_classes, random_policy, states
from pipelines.bench.stats import over, ratio_interval
from pipelines.bench.stats import rate as rate_of
from pipelines.stack import broker, processes
from pipelines.telemetry.reading import records

STRETCH_S: Final = 1.0
SETTLE_S: Final = 0.25
"""Of a stretch's beginning: longer than an event waits before it is handed over."""
STEPS: Final = 64
"""Steps that are really made; they are emitted again and again."""
DRAFTS_SHARE: Final = 2
"""One cycle of so many has a cache draft: only these have features, and cost more."""
TIMED: Final = 8
"""One emission of so many is timed by itself."""
QUEUE: Final = 65_536
DRAIN_S: Final = 30.0


def measure(rate: float, seconds: float, progress: Callable[[float], None]) -> dict[str, Any]:
    """Emit ``rate`` events a second in half of ``seconds``; ``progress`` is told how many
    of these have passed.

    Starts a broker, unless the environment names one.

    Returns:
        for ``--json``. ``events_per_s`` is the rate in stretches that emit, every other second;
        what the carrier and the broker take in the mean is ``sustained_per_s``, about half. The
        loss is the decoding thread's, of its rate, with its 95% interval. ``emit_us`` and
        ``hand_over_us`` are what an event costs under the interpreter's lock: in the decoding
        thread, and in the one that hands over; ``interpreter_percent`` is their part of a second
        at that rate, the most that they can cost. ``carrier_us`` is processor time of the other
        process, ``processor_us`` the sum. Bytes are compressed, as they travel.

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
    queue, emitter = EventQueue(QUEUE), Emitter()
    origin = Origin("bench", "bench", f"{time.time_ns():016x}"[-16:])

    def status() -> WorkerStatus:
        made = handover.accounts().made
        return WorkerStatus(process="bench", scope="bench", time=time.time(), events_made=made)

    handover = Handover(kafka, queue, tell, origin, status)
    ends = _ends(kafka)
    handover.start()
    _until(lambda: handover.accounts().sent > 0, lambda: emitter.emit(queue, timed=False))
    step_s = BATCH / rate
    policy, pool, classes = random_policy("survival"), states(BATCH), random_classes()
    work = partial(decide, policy, pool, classes)
    took = np.median(timeit.repeat(work, timer=time.thread_time, repeat=5, number=20)) / 20
    rounds = max(1, round(step_s / float(took)))
    pid = handover.pid
    assert pid is not None
    carrier = psutil.Process(pid)
    before = carrier.cpu_times(), handover.processor_s, queue.made
    busy: list[float] = []
    free: list[float] = []
    emitting = 0.0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for emits, found in ((True, busy), (False, free)):
            mean, spent = _stretch(work, rounds, emitter, queue if emits else None)
            found.append(mean)
            emitting += spent
            progress(time.monotonic() - began)
    lasted = time.monotonic() - began
    _until(lambda: not handover.accounts().waiting, lambda: time.sleep(0.05))
    events = queue.made - before[2]
    used = carrier.cpu_times()
    carrier_s = sum(used[:2]) - sum(before[0][:2])
    handing_s = handover.processor_s - before[1]
    handover.close()
    accounts = handover.accounts()
    delivered, size = _read(kafka, ends, origin.life)
    mine, other = ([(1.0, second) for second in side] for side in (busy, free))
    ratio, between = over(rate_of(mine), rate_of(other)), ratio_interval(mine, other)
    emit_us, hand_over_us = emitting / events * 1e6, handing_s / events * 1e6
    carrier_us = carrier_s / events * 1e6
    return {
        "events_per_s": BATCH / float(np.median(busy)),
        "sustained_per_s": events / lasted,
        "decode_loss_percent": None if ratio is None else 100.0 * (1.0 - ratio),
        "decode_loss_low": None if between is None else 100.0 * (1.0 - between[1]),
        "decode_loss_high": None if between is None else 100.0 * (1.0 - between[0]),
        "p99_emit_us": float(np.percentile(emitter.took, 99)) * 1e6,
        "emit_us": emit_us,
        "hand_over_us": hand_over_us,
        "interpreter_percent": 100.0 * (emit_us + hand_over_us) * rate / 1e6,
        "carrier_us": carrier_us,
        "processor_us": emit_us + hand_over_us + carrier_us,
        "bytes_per_event": size / max(delivered, 1),
        "events": accounts.made,
        "delivered": delivered,
        "dropped": accounts.made - accounts.sent,
        "machine": machine.description(),
    }


class Emitter:
    """Cycles of steps of 64 requests, emitted as the router does; ``took`` are seconds of some."""

    def __init__(self) -> None:
        draw, policy = np.random.default_rng(0), first_policy("bench")
        options = [
            RequestOptions(
                512, 4096, opaque=f"{row:024x}", tenant="a" * 24, session=f"{row % 9:024x}",
                workload="chat",
            )
            for row in range(BATCH)
        ]  # fmt: skip
        self.took: list[float] = []
        self._steps = [_labels(draw, policy, options, index) for index in range(STEPS)]
        self._options = options
        self._number = 0
        self._step = 0

    def emit(self, queue: EventQueue, timed: bool = True) -> None:
        """Put the events of the next step."""
        labels = self._steps[self._step % STEPS]
        self._step += 1
        number = self._number
        self._number += BATCH
        clock = time.perf_counter
        for row, (options, label) in enumerate(zip(self._options, labels, strict=True)):
            if timed and not row % TIMED:
                began = clock()
                queue.put((number + row, "", options, label, ""))
                self.took.append(clock() - began)
            else:
                queue.put((number + row, "", options, label, ""))


def _labels(
    draw: np.random.Generator, policy: Any, options: list[RequestOptions], index: int
) -> list[Label[Cycle]]:
    drafts = range(0, BATCH, DRAFTS_SHARE)
    step = Step(
        200, 400, 10, BATCH, time.time(), 1.7, MODEL_LEN, draw.integers(0, 3, BATCH).tolist(),
        [0] * BATCH, [4] * BATCH, draw.random(BATCH).astype(np.float32) * 5,
        draw.random(BATCH).astype(np.float32), _features(draw, len(drafts)), 600.0, 270, 6_400.0,
        policy,
    )  # fmt: skip
    made = []
    for row in range(BATCH):
        has = row % DRAFTS_SHARE == 0
        cycle = Cycle(
            step, row, row // DRAFTS_SHARE if has else -1, index, 3 * index, 12 if has else 0, (),
            drafted_len=4, committed=3, verified_len=4,
        )  # fmt: skip
        made.append(Label(cycle, int(draw.integers(12)) if has else 0, censored=False))
    return made


def _features(draw: np.random.Generator, n: int) -> Any:
    """Half of them zero or one, as most of a real draft's are; the others any number."""
    plain = draw.random((n, NUM_FEATURES)).astype(np.float32)
    plain[:, ::2] = plain[:, ::2].round()
    return plain


def _stretch(
    work: Callable[[], object], rounds: int, emitter: Emitter, queue: EventQueue | None
) -> tuple[float, float]:
    """Mean seconds of a step, its beginning left out; and the thread's own time to emit in all."""
    began, emitting, steps, since = time.perf_counter(), 0.0, 0, 0.0
    while (now := time.perf_counter()) - began < STRETCH_S:
        if not since and now - began > SETTLE_S:
            since, steps = now, 0
        for _ in range(rounds):
            work()
        if queue is not None:
            emitted = time.thread_time()
            emitter.emit(queue)
            emitting += time.thread_time() - emitted
        steps += 1
    return (now - (since or began)) / steps, emitting  # one step may outlast the beginning


def _until(done: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    deadline = time.monotonic() + DRAIN_S
    while not done() and time.monotonic() < deadline:
        meanwhile()
        time.sleep(0.05)


def _ends(kafka: KafkaSettings) -> dict[Any, int]:
    with closing(open_consumer(kafka, "bench")) as consumer:
        return dict(consumer.end_offsets(places_of(consumer, DRAFTS.name)))


def _read(kafka: KafkaSettings, since: dict[Any, int], life: str) -> tuple[int, int]:
    """Distinct events of ``life`` that lie behind ``since``, and their bytes.

    Raises:
        BrokerError: they do not come.
    """
    numbers, size, squeeze = set[int](), 0, zstandard.ZstdCompressor()
    with closing(open_consumer(kafka, "bench", max_partition_fetch_bytes=8 << 20)) as consumer:
        ends = consumer.end_offsets(list(since))
        wanted = {at.partition: range(offset, ends[at]) for at, offset in since.items()}
        for record in itertools.chain.from_iterable(records(consumer, DRAFTS, wanted)):
            batch = decode_batch(record.value)
            if batch.origin.life == life:
                numbers.update(batch.numbers["number"].tolist())
                size += len(squeeze.compress(record.value))
    return len(numbers), size
