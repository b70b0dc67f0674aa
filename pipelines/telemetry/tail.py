"""Draft events as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from kafka import TopicPartition

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from decoder.kafka.clients import fetch
from pipelines.telemetry.reading import reading, since, spans
from pipelines.telemetry.rows import Intake

PAUSE_S: Final = 0.2
HEAD: Final = (
    f"{'time':<12} {'worker':<20} {'workload':<16} {'arm':<6} {'draft':>5} {'ran':>4} "
    f"{'acc':>4} {'exp':>5} {'batch':>5} {'step ms':>8}  label"
)


def follow(
    kafka: KafkaSettings, intake: Intake, wanted: Mapping[str, str], began: float | None
) -> Iterator[dict[str, Any]]:
    """New events whose columns are what ``wanted`` says, for ever.

    Args:
        intake: counts what is read.
        began: also what was sent since then, seconds since the epoch.

    Raises:
        BrokerError: the broker does not answer.
    """
    with reading(kafka, "tail") as consumer:
        lying = spans(consumer, DRAFTS)
        first = since(consumer, DRAFTS, lying, began) if began is not None else {}
        places = [TopicPartition(DRAFTS.name, partition) for partition in lying]
        consumer.assign(places)
        for place in places:
            span = lying[place.partition]
            consumer.seek(place, first.get(place.partition, range(span.stop, span.stop)).start)
        while True:
            came = fetch(consumer, passed=lambda batch: intake.pass_over(batch.upto - batch.offset))
            for record in came:
                rows = intake.take(record.partition, record.value)
                for row in rows.dictionaries() if rows is not None else ():
                    if all(row[name] == value for name, value in wanted.items()):
                        yield row
            if not came:
                time.sleep(PAUSE_S)


def line(row: Mapping[str, Any]) -> str:
    """``row`` for people, under :data:`HEAD`."""
    at = datetime.fromtimestamp(row["time"]).strftime("%H:%M:%S.%f")[:-3]
    expected = row["predicted_model"] if row["arm"] == "model" else row["predicted"]
    accepted = row["model_accepted"] if row["arm"] == "model" else row["accepted"]
    said = " ".join(
        each for each in (row["label"], row["censored"], row["side"] and f"side {row['side']}")
        if each
    )  # fmt: skip
    return (
        f"{at:<12} {row['worker'][:20]:<20} {row['workload'][:16] or '-':<16} {row['arm']:<6} "
        f"{row['draft_len']:>5} {row['verified_len']:>4} {accepted or 0:>4} {expected:>5.1f} "
        f"{row['batch_size']:>5} {row['step_us'] / 1e3:>8.1f}  {said}"
    )
