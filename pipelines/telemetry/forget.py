"""What is held of a tenant, and the deletion of it, as far as Kafka can delete.

A tenant is on the topics as a pseudonym alone, in records that hold others' rows as well. Kafka
deletes records by age, or all of a partition up to one of them: so whoever will not wait for the
age gives up what others have there up to the tenant's last record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from kafka import TopicPartition
from kafka.errors import KafkaError

from decoder.contracts.errors import BrokerError, SettingsError, TraceError
from decoder.contracts.identity import Pseudonyms, is_pseudonym
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import TOPICS
from decoder.kafka.clients import AWAY, close, open_admin
from decoder.settings import WorkerSettings
from decoder.tenancy.callers import spellings
from decoder.tenancy.key import FILE_VARIABLE, VARIABLE, key_of
from learner.topics import RETENTION, SEGMENT, SEGMENT_MS, settings_of
from pipelines.reports import atomic_write
from pipelines.stack.interrupts import held
from pipelines.telemetry.export import NOTE, write_table
from pipelines.telemetry.reading import reading, records, spans

REQUEST_MS: Final = 30_000
SEARCHED: Final = tuple(topic for topic in TOPICS if not topic.compacted)
"""Policies and leases, which are kept for ever, have nothing of a tenant."""
ELSEWHERE: Final = (
    "Policies hold weights and averages of all tenants together, statuses and leases nothing of "
    "one.",
    "A learner's buffer and checkpoint hold numbers without a tenant, under hashes of requests. "
    "They leave as newer ones come (HVD_LEARNER_BUFFER_EVENTS); at once, if the learner is stopped "
    "and its HVD_LEARNER_STATE_DIR removed: it begins anew with what the topic still holds.",
    "A worker's caches hold the tenant's outputs as tokens, in memory alone: they end with the "
    "process. What a worker has spilled while the broker was away is sent when that is back: run "
    "this again then.",
    "Copies (mirrors, backups, what others consumed) are out of reach here.",
)
"""What this command does not delete, and how it goes."""


@dataclass(frozen=True)
class Held:
    """Records of a partition that hold the tenant; ``upto`` is the offset behind the last."""

    topic: str
    partition: int
    records: int
    upto: int
    others: int  # records up to there that do not
    newest: float  # seconds since the epoch, of the last one
    gone_at: float  # when the topic has let go of it at the latest; 0: the broker does not say


def name_from(given: str, read: Callable[[], str]) -> str:
    """The tenant's name: ``given``, or where that is ``-`` the first line that ``read`` brings.

    A command line stands in the list of processes and in a shell's history: no place for a key.

    Raises:
        SettingsError: there is none.
    """
    name = read().partition("\n")[0].removesuffix("\r") if given == "-" else given
    if not name:
        raise SettingsError(
            "no tenant is named: give --tenant a pseudonym or name, or - and its API key on "
            "standard input."
        )
    return name


def pseudonyms_of(tenant: str) -> tuple[str, ...]:
    """``tenant``, if it is a pseudonym, and all that may stand for it under the operator's key.

    Raises:
        SettingsError: it is none, and there is no key here.
    """
    itself = (tenant,) if is_pseudonym(tenant) else ()
    key = key_of(WorkerSettings.load())
    if key is not None:
        names = Pseudonyms(key)
        return *itself, *(names.of("tenant", text) for text in spellings(tenant))
    if not itself:
        raise SettingsError(
            f"what --tenant names is no pseudonym (24 hexadecimal digits): name that, or set "
            f"{VARIABLE} or {FILE_VARIABLE}, under which it is made."
        )
    return itself


def found(kafka: KafkaSettings, pseudonyms: Sequence[str]) -> list[Held]:
    """Where ``pseudonyms`` are on the topics, as far as records lie there now; reads all of them.

    Raises:
        BrokerError: the broker is away.
    """
    kept = _retentions(kafka)
    # They stand in JSON, and in what is none, as they are.
    sought = [pseudonym.encode() for pseudonym in pseudonyms]
    there: list[Held] = []
    with reading(kafka, "forget") as consumer:
        for topic in SEARCHED:
            lying = spans(consumer, topic)
            hits: dict[int, tuple[int, int, float]] = {}
            for fetched in records(consumer, topic, lying):
                for record in fetched:
                    value = record.value or b""
                    if any(each in value for each in sought):
                        count, _, newest = hits.get(record.partition, (0, 0, 0.0))
                        at = max(newest, record.timestamp / 1e3)
                        hits[record.partition] = count + 1, record.offset + 1, at
            for partition, (count, upto, newest) in sorted(hits.items()):
                others = upto - lying[partition].start - count
                gone_at = newest + kept[topic.name] if topic.name in kept else 0.0
                there.append(Held(topic.name, partition, count, upto, others, newest, gone_at))
    return there


def delete(kafka: KafkaSettings, there: Sequence[Held]) -> None:
    """Delete all records up to the tenant's last, where ``there`` says so; others' as well.

    Raises:
        BrokerError: the broker refuses.
    """
    admin: Any = None
    upto = {TopicPartition(each.topic, each.partition): each.upto for each in there}
    try:
        admin = open_admin(kafka, "forget", REQUEST_MS)
        admin.delete_records(upto)
    except AWAY as error:
        raise BrokerError(
            f"Kafka at {kafka.bootstrap_servers} does not delete records ({error!r}): grant this "
            "process DELETE on the topics, or wait for their retention."
        ) from error
    finally:
        close(admin)


def forget_in(folder: Path, pseudonyms: Sequence[str]) -> int:
    """Write the export in ``folder`` again without the tenant's rows; how many there were.

    What was read is remembered as read: to export on does not bring them back.

    Raises:
        TraceError: there is no export, or the disk refuses; each file is as it was, or without.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    gone = 0
    its = pa.array(pseudonyms, pa.string())
    try:
        told = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        for name in told["files"]:
            table = pq.read_table(folder / name)
            kept = table.filter(pc.invert(pc.is_in(table["tenant"], its)))
            if len(kept) < len(table):
                told["rows"] -= len(table) - len(kept)
                with held():
                    write_table(folder / name, kept)
                    atomic_write(folder / NOTE, partial(_write_note, told))
                gone += len(table) - len(kept)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"the export in {folder} cannot be written anew: {error}") from error
    return gone


def _write_note(told: dict[str, Any], part: Path) -> None:
    part.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def as_dict(pseudonyms: Sequence[str], there: Sequence[Held]) -> dict[str, Any]:
    """For JSON."""
    return {"pseudonyms": [*pseudonyms], "held": [asdict(each) for each in there]}


def _retentions(kafka: KafkaSettings) -> dict[str, float]:
    """Seconds that each topic keeps a record at most, where the broker says so.

    Kafka deletes segments whole, once the newest record in them is older than ``retention.ms``: a
    record waits for those that came up to ``segment.ms`` after it, while more are written.
    """
    admin: Any = None
    try:
        admin = open_admin(kafka, "forget", REQUEST_MS)
        told = settings_of(admin)
    except (KafkaError, OSError):
        return {}
    finally:
        close(admin)
    return {
        name: (age + int(settings.get(SEGMENT, SEGMENT_MS))) / 1e3
        for name, settings in told.items()
        if (age := int(settings.get(RETENTION, "-1"))) >= 0
    }
