"""The topics as the project needs them: made where they are missing, put right where they are not.

A draft topic that is compacted keeps one record a worker; a policy topic that is not forgets the
champion. Both work until a worker starts and finds nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from kafka.admin import ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import InvalidReplicationFactorError, KafkaError, TopicAlreadyExistsError

from decoder.contracts.errors import BrokerError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, TOPICS, Topic
from decoder.kafka.clients import AWAY, listens, open_admin

log = logging.getLogger(__name__)

REQUEST_MS: Final = 5_000
RETRY_SECONDS: Final = 2.0
CLEANUP: Final = "cleanup.policy"
RETENTION: Final = "retention.ms"
SEGMENT: Final = "segment.ms"
SEGMENT_MS: Final = 604_800_000
"""Kafka's own ``segment.ms``, a week, which is its ``retention.ms`` as well."""
SHORT_MS: Final = 3_600_000
"""A learner that is away for an hour is not unusual: a topic that keeps less is spoken of."""
COMPACTED_SEGMENT: Final = {SEGMENT: "3600000"}
"""An hour, for Kafka compacts no segment that it still writes: in its own week a lease alone makes
150,000 records a scope, and whoever starts reads them all."""


class BrokerAway(BrokerError):
    """Nobody answers there yet, or a broker that is not ready."""


def make_right(kafka: KafkaSettings, limits: Mapping[str, str] | None = None) -> None:
    """Create the topics that are missing, and mend the clean-up of those that have another.

    What a broker does not tell (the embedded one knows no setting that it was not given) is taken
    to be right. Partitions are left as they are: any number does.

    Args:
        limits: settings of topics that are made and are not compacted, such as ``retention.bytes``.

    Raises:
        BrokerAway: the broker cannot be reached, or says what passes: to ask again may help.
        BrokerError: it refuses; with the command that would do it.
    """
    if not listens(kafka):
        raise BrokerAway(
            f"no broker at {kafka.bootstrap_servers}. Is Kafka running, and does "
            "HVD_KAFKA_BOOTSTRAP_SERVERS name it?"
        )
    try:
        admin = open_admin(kafka, "topics", REQUEST_MS)
    except AWAY as error:
        raise BrokerAway(f"no broker at {kafka.bootstrap_servers} ({error})") from error
    try:
        there = set(admin.list_topics())
        for topic in TOPICS:
            if topic.name not in there:
                _create(admin, topic, COMPACTED_SEGMENT if topic.compacted else limits or {})
        told = settings_of(admin)
        for topic in TOPICS:
            _mend(admin, kafka, topic, told.get(topic.name, {}))
    except AWAY as error:
        kind, what = (BrokerAway, "does not yet") if _passes(error) else (BrokerError, "cannot")
        raise kind(f"Kafka at {kafka.bootstrap_servers} {what} hold the topics: {error}") from error
    finally:
        admin.close()


def wait_until_right(kafka: KafkaSettings, stop: threading.Event) -> None:
    """Wait for the broker and put its topics right, unless ``stop`` is set first.

    Raises:
        BrokerError: a topic is not as it must be, and may not be changed.
    """
    while not stop.is_set():
        try:
            make_right(kafka)
            return
        except BrokerAway as error:
            log.warning("%s; trying again in %.0f s", error, RETRY_SECONDS)
            stop.wait(RETRY_SECONDS)


def _passes(error: Exception) -> bool:
    """Whether it is of a broker that starts, ends, or hands over its part: also too few of them for
    the replicas that are wanted."""
    passing = isinstance(error, OSError | InvalidReplicationFactorError)
    return passing or (isinstance(error, KafkaError) and bool(error.retriable))


def _create(admin: Any, topic: Topic, limits: Mapping[str, str]) -> None:
    new = NewTopic(topic.name, 1, -1, topic_configs={CLEANUP: topic.cleanup, **limits})
    try:
        admin.create_topics([new])
        log.info("made topic %s", topic.name)
    except TopicAlreadyExistsError:
        pass  # another process was quicker
    except KafkaError as error:
        if _passes(error):
            raise
        raise BrokerError(
            f"topic {topic.name} is missing and this process may not make it ({error}): "
            f"kafka-topics.sh --create --topic {topic.name} --config {CLEANUP}={topic.cleanup}"
        ) from error


def settings_of(admin: Any) -> dict[str, dict[str, str]]:
    """The settings of each topic by name, as far as the broker says them."""
    resources = [ConfigResource(ConfigResourceType.TOPIC, topic.name) for topic in TOPICS]
    try:
        answer = admin.describe_configs(resources, config_filter="all")
    except KafkaError as error:
        log.warning("the broker does not say how its topics are set (%s); going on", error)
        return {}
    return {
        name: {
            key: str(entry["value"])
            for key, entry in settings.items()
            if entry["value"] is not None
        }
        for name, settings in answer.get("topic", {}).items()
    }


def _mend(admin: Any, kafka: KafkaSettings, topic: Topic, told: Mapping[str, str]) -> None:
    cleanup = told.get(CLEANUP, topic.cleanup)
    if cleanup != topic.cleanup:
        log.warning("topic %s has %s=%s: set to %s", topic.name, CLEANUP, cleanup, topic.cleanup)
        command = _set(admin, kafka, topic, CLEANUP, topic.cleanup)
        if command:
            raise BrokerError(
                f"topic {topic.name} has {CLEANUP}={cleanup} and this learner may not change it "
                f"{command}"
            )
    kept = int(told.get(RETENTION, "-1"))
    if topic is DRAFTS and 0 <= kept < SHORT_MS:
        log.warning(
            "topic %s keeps records for %d s only: a learner away for longer loses the rest",
            topic.name, kept // 1_000,
        )  # fmt: skip
    if not topic.compacted and 0 < kept < int(told.get(SEGMENT, "0")):
        log.warning(
            "topic %s has %s=%s, but Kafka deletes no segment that it still writes, and begins "
            "another only after %s=%s: set to %d",
            topic.name, RETENTION, told[RETENTION], SEGMENT, told[SEGMENT], kept,
        )  # fmt: skip
        command = _set(admin, kafka, topic, SEGMENT, str(kept))
        if command:
            log.warning("this learner may not change it %s", command)


def _set(admin: Any, kafka: KafkaSettings, topic: Topic, name: str, value: str) -> str:
    """Set it; where that is refused, why, and the command that would do it."""
    try:
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic.name, {name: value})])
    except KafkaError as error:
        if _passes(error):
            raise
        return (
            f"({error}): kafka-configs.sh --bootstrap-server {kafka.bootstrap_servers} --alter "
            f"--topic {topic.name} --add-config {name}={value}"
        )
    return ""
