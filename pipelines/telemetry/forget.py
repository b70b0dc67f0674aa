"""Finds and deletes a tenant's records, as far as Kafka allows.

Topics hold a tenant's pseudonym only, in records with other tenants' rows. Kafka deletes records by
age, or all of a partition up to an offset. So immediate deletion also deletes others' records up to
the tenant's last one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from kafka import TopicPartition
from kafka.errors import UnknownTopicOrPartitionError

from decoder.contracts.errors import BrokerError, SettingsError
from decoder.contracts.identity import Pseudonyms, is_pseudonym
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import TOPICS
from decoder.kafka.clients import AWAY, open_admin
from decoder.kafka.codec import LATEST_MS
from decoder.settings import WorkerSettings
from decoder.tenancy.identities import HEADER, KEY, NAMED, of_authorization
from decoder.tenancy.key import FILE_VARIABLE, VARIABLE, key_of
from learner.topics import RETENTION, SEGMENT, SEGMENT_MS, settings_of
from pipelines.telemetry.reading import reading, records, spans

REQUEST_MS: Final = 30_000
AHEAD_SECONDS: Final = 86_400.0
"""Clocks are ahead by less; a later timestamp has another unit, or is made up."""
SEARCHED: Final = tuple(topic for topic in TOPICS if not topic.compacted)
"""Compacted topics, which are kept forever, hold nothing of a tenant."""
ELSEWHERE: Final = (
    "Out of reach here: a learner's buffer and checkpoint, numbers without a tenant, which newer "
    "ones replace, or which go with its HVD_LEARNER_STATE_DIR; a worker's caches, which end with "
    "its process; events that wait in a worker while the broker is away: run this again when it is "
    "back; exports and copies. See docs/telemetry.md, Deleting a tenant."
)


@dataclass(frozen=True)
class Held:
    """Records of a partition with the tenant; ``upto`` is the offset after the last."""

    topic: str
    partition: int
    records: int
    upto: int
    others: int  # records before it without the tenant
    newest: float  # latest time that is not ahead, seconds since the epoch; 0: none
    gone_at: float  # latest expiry; 0: the broker does not say
    ahead: int = 0  # records with a time in the future


def sentence(held: Held) -> str:
    """``held`` for people."""
    newest, gone_at = (
        # a topic may keep records beyond the last date
        datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M") if at <= LATEST_MS / 1e3 else "never"
        for at in (held.newest, held.gone_at)
    )
    ahead = (
        f"; the time of {held.ahead} lies ahead: Kafka keeps their segments until it has passed, "
        "unless records are deleted"
    )
    return (
        f"{held.topic}, partition {held.partition}: {held.records} records hold it, and "
        f"{held.others} of others lie before the last of them"
        + (f", of {newest}" if held.newest else "")
        + "; gone by: "
        + (gone_at if held.gone_at else "the broker does not say")
        + (ahead if held.ahead else "")
    )


def pseudonyms_of(tenant: str) -> tuple[str, ...]:
    """``tenant``, if it is a pseudonym, and its possible pseudonyms under the operator's key.

    Raises:
        SettingsError: it is no pseudonym, and there is no key here.
    """
    pseudonyms = [tenant] if is_pseudonym(tenant) else []
    if (key := key_of(WorkerSettings.load())) is not None:
        pseudonyms += (Pseudonyms(key).of("tenant", text) for text in spellings(tenant))
    if not pseudonyms:
        raise SettingsError(
            f"what --tenant names is no pseudonym (24 hexadecimal digits): name that, or set "
            f"{VARIABLE} or {FILE_VARIABLE}, under which it is made."
        )
    return tuple(pseudonyms)


def found(kafka: KafkaSettings, pseudonyms: Sequence[str]) -> tuple[list[Held], dict[str, int]]:
    """Find ``pseudonyms`` on the topics; reads all records.

    Returns:
        where they are, and how many records of each topic cannot be decompressed and may hold them.

    Raises:
        BrokerError: the broker is away.
    """
    retentions = _retentions(kafka)
    # They appear unescaped in JSON.
    sought = [pseudonym.encode() for pseudonym in pseudonyms]
    there: list[Held] = []
    unreadable: dict[str, int] = {}
    with reading(kafka, "forget") as consumer:
        for topic in SEARCHED:
            try:
                available = spans(consumer, topic)
            except UnknownTopicOrPartitionError:
                continue
            hits: dict[int, tuple[int, int, float, int]] = {}
            latest = time.time() + AHEAD_SECONDS
            passed: list[int] = []
            for fetched in records(consumer, topic, available, passed.append):
                for record in fetched:
                    value = record.value or b""
                    if any(each in value for each in sought):
                        count, _, newest, ahead = hits.get(record.partition, (0, 0, 0.0, 0))
                        at = record.timestamp / 1e3
                        newest, ahead = max(newest, at * (at <= latest)), ahead + (at > latest)
                        hits[record.partition] = count + 1, record.offset + 1, newest, ahead
            for partition, (count, upto, newest, ahead) in sorted(hits.items()):
                others = upto - available[partition].start - count
                gone_at = (
                    newest + retentions[topic.name] if newest and topic.name in retentions else 0.0
                )
                there.append(
                    Held(topic.name, partition, count, upto, others, newest, gone_at, ahead)
                )
            if passed:
                unreadable[topic.name] = sum(passed)
    return there, unreadable


def delete(kafka: KafkaSettings, there: Sequence[Held]) -> None:
    """Delete all records up to the tenant's last, in each partition of ``there``; others' as well.

    Raises:
        BrokerError: the broker refuses.
    """
    try:
        with closing(open_admin(kafka, "forget", REQUEST_MS)) as admin:
            admin.delete_records({TopicPartition(h.topic, h.partition): h.upto for h in there})
    except AWAY as error:
        raise BrokerError(
            f"Kafka at {kafka.bootstrap_servers} does not delete records ({error!r}): grant this "
            "process DELETE on the topics, or wait for their retention."
        ) from error


def _retentions(kafka: KafkaSettings) -> dict[str, float]:
    """The longest time in seconds that each topic keeps a record, if the broker says so.

    Kafka deletes whole segments, once their newest record is older than ``retention.ms``. A segment
    takes records for up to ``segment.ms``.
    """
    try:
        with closing(open_admin(kafka, "forget", REQUEST_MS)) as admin:
            configs = settings_of(admin)
    except AWAY:
        return {}
    return {
        name: (age + int(settings.get(SEGMENT, SEGMENT_MS))) / 1e3
        for name, settings in configs.items()
        if (age := int(settings.get(RETENTION, "-1"))) >= 0
    }


def spellings(name: str) -> tuple[str, ...]:
    """Every text that a worker may have hashed for the tenant called ``name``.

    ``name`` itself is included, so that a caller with its claim, or one source of several, can be
    given exactly.
    """
    caller, separator, claim = name.partition(NAMED)
    # ASGI leaves the encoding of headers open: they are read as Latin-1. A claim is in the body.
    latin = caller.encode(errors="surrogateescape").decode("latin-1").strip() + separator + claim
    sources = f"{HEADER}{latin}", f"{KEY}{latin}", of_authorization(latin), f"{NAMED}{name}"
    return tuple(dict.fromkeys((name, latin, *sources)))
