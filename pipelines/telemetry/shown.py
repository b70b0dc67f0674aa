"""What was described, as tables of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.markup import escape
from rich.table import Table

from decoder.kafka.unpacking import LATEST_MS
from pipelines.telemetry.describe import Described, Lying
from pipelines.telemetry.forget import Held


def described(told: Described) -> Iterator[Table | str]:
    """The topics, then the draft events of the sample."""
    table = Table(title="Topics", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("topic", "parts", "records", "of these read: from", "to", "a second", "kB each"):
        table.add_column(name, justify="left" if name in ("topic",) else "right")
    for topic in told.topics:
        table.add_row(*_row(topic))
    yield table
    for topic in told.topics:
        if topic.unreadable:
            yield f"{topic.topic}: {topic.unreadable} records of the sample cannot be unpacked."
    counts = told.counts
    yield (
        f"Of the {counts['records']} draft records read: {counts['rows']} events in "
        f"{told.seconds:.0f} s ({told.events_per_s:.1f} a second, {told.bytes_an_event:.0f} "
        f"bytes each before compression), {counts['duplicates']} came twice, "
        f"{counts['missing']} records missing, {counts['refused']} refused."
    )
    for name, rows in told.by.items():
        parts = ", ".join(f"{escape(value)} {count}" for value, count in rows.items())
        yield f"Events by {name}: {parts or '-'}"
    lag = ", ".join(f"{escape(name)} {count} records" for name, count in told.lag.items())
    yield f"Behind: {lag or 'no learner has spoken'}"


def held_table(there: Sequence[Held]) -> Table:
    """Where a tenant is, and until when."""
    table = Table(
        title="Records that hold it", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for name in ("topic", "partition", "records", "others before", "newest", "gone by"):
        table.add_column(name)
    for each in there:
        ends = _moment(each.gone_at) if each.gone_at else "the broker does not say"
        counts = (str(each.partition), str(each.records), str(each.others))
        table.add_row(each.topic, *counts, _moment(each.newest), ends)
    return table


def _moment(at: float) -> str:
    if at > LATEST_MS / 1e3:  # a topic may keep records for longer than there are dates
        return "never"
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


def _row(topic: Lying) -> tuple[str, ...]:
    if not topic.sampled:
        return (topic.topic, str(topic.partitions), str(topic.records), "-", "-", "-", "-")
    return (
        topic.topic,
        str(topic.partitions),
        str(topic.records),
        *(
            datetime.fromtimestamp(at).strftime("%m-%d %H:%M:%S")
            for at in (topic.first, topic.last)
        ),
        f"{topic.rate:.2f}",
        f"{topic.bytes_a_record / 1e3:.1f}",
    )
