"""Creates topics that are missing, and repairs their configuration.

A compacted draft topic would keep one record a worker; a policy topic that is not compacted would
lose the champion. Neither fails until a worker starts and finds nothing.

``python -m learner.topics FILE`` configures topics as a file declares. A learner creates missing
topics with one partition and the broker's retention; a fleet declares more, and does not let
learners create topics. The file has a table a topic: ``partitions``, ``replicas`` (-1: the broker's
default), and ``config`` with Kafka's keys.
"""

from __future__ import annotations

import logging
import sys
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from kafka.admin import ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import InvalidReplicationFactorError, KafkaError, TopicAlreadyExistsError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from decoder.contracts.errors import BrokerError, HvdError, SettingsError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, TOPICS, Topic
from decoder.kafka.clients import AWAY, close, listens, open_admin

log = logging.getLogger(__name__)

REQUEST_MS: Final = 5_000
DECLARE_MS: Final = 30_000
RETRY_SECONDS: Final = 2.0
CLEANUP: Final = "cleanup.policy"
RETENTION: Final = "retention.ms"
SEGMENT: Final = "segment.ms"
SEGMENT_MS: Final = 604_800_000  # Kafka's default of ``segment.ms`` and ``retention.ms``, a week
SHORT_MS: Final = 3_600_000  # shorter retention is logged: a learner may well be away for an hour
COMPACTED_SEGMENT: Final = {SEGMENT: "3600000"}
"""An hour. Kafka does not compact the active segment: in a week, one lease writes 150,000 records,
which each starting learner would read."""


class BrokerAway(BrokerError):
    """The broker does not answer, or is not ready yet."""


class Declared(BaseModel):
    """Declaration of a topic; the broker chooses what is absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partitions: Annotated[int, Field(ge=1, le=10_000)] = 1
    replicas: Annotated[int, Field(ge=-1, le=1_000)] = -1
    config: dict[str, str] = Field(default_factory=dict)


def ensure_topics(kafka: KafkaSettings, limits: Mapping[str, str] | None = None) -> None:
    """Create missing topics, and repair clean-up policies and segments.

    Settings that a broker does not report (the embedded one knows only those it was given) count as
    right. Partitions are not changed: any number works.

    Args:
        limits: settings of created topics that are not compacted, such as ``retention.bytes``.

    Raises:
        BrokerAway: the broker is unreachable or not ready: a retry may help.
        BrokerError: it refuses; names the command to run.
    """
    with admin_client(kafka, REQUEST_MS) as admin:
        existing = set(admin.list_topics())
        for topic in TOPICS:
            if topic.name not in existing:
                more = COMPACTED_SEGMENT if topic.compacted else limits or {}
                _create(admin, topic.name, Declared(config={CLEANUP: topic.cleanup, **more}))
        settings = settings_of(admin)
        for topic in TOPICS:
            _repair(admin, kafka, topic, settings.get(topic.name, {}))


def wait_for_topics(kafka: KafkaSettings, stop: threading.Event) -> None:
    """Wait for the broker, then :func:`ensure_topics`; returns early if ``stop`` is set.

    Raises:
        BrokerError: a topic is misconfigured and may not be changed.
    """
    while not stop.is_set():
        try:
            ensure_topics(kafka)
            return
        except BrokerAway as error:
            log.warning("%s; trying again in %.0f s", error, RETRY_SECONDS)
            stop.wait(RETRY_SECONDS)


def read(path: Path) -> dict[str, Declared]:
    """Read declarations by topic.

    Raises:
        SettingsError: the file is unreadable, omits a topic, names another, has a wrong clean-up
            policy, or a retention that Kafka would not keep to.
    """
    try:
        topics = TypeAdapter(dict[str, Declared]).validate_python(tomllib.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"{path} is wrong at {where}: {first['msg']}.") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} declares no topics: {error}.") from error
    if topics.keys() != (names := {topic.name for topic in TOPICS}):
        wrong = ", ".join(sorted(topics.keys() ^ names))
        raise SettingsError(f"{path} must declare our topics, each once: look at {wrong}.")
    for topic in TOPICS:
        if topics[topic.name].config.get(CLEANUP) != topic.cleanup:
            raise SettingsError(f"{path}: {CLEANUP} of {topic.name} must be {topic.cleanup!r}.")
        _check_retention(path, topic.name, topics[topic.name].config)
    return topics


def _check_retention(path: Path, name: str, config: Mapping[str, str]) -> None:
    try:
        retention, segment = (int(config.get(key, SEGMENT_MS)) for key in (RETENTION, SEGMENT))
    except ValueError as error:
        raise SettingsError(f"{path}: {RETENTION} and {SEGMENT} of {name}: {error}.") from error
    if 0 < retention < segment:
        raise SettingsError(
            f"{path}: {RETENTION} of {name} is {retention}, but Kafka does not delete the active "
            f"segment, and starts another only after {SEGMENT}={segment}: set {SEGMENT} to at most "
            f"{retention}."
        )


def declare(kafka: KafkaSettings, topics: Mapping[str, Declared]) -> None:
    """Create missing topics; give existing ones the declared partitions and settings.

    Kafka cannot remove partitions; replicas of existing topics are left to other tools.

    Raises:
        BrokerError: the broker is away, or refuses.
    """
    with admin_client(kafka, DECLARE_MS) as admin:
        existing = topics.keys() & set(admin.list_topics())
        for name in topics.keys() - existing:
            _create(admin, name, topics[name])
        # an empty list would describe all topics
        for topic in admin.describe_topics(sorted(existing)) if existing else ():
            name, count, wanted = topic["name"], len(topic["partitions"]), topics[topic["name"]]
            if count < wanted.partitions:
                admin.create_partitions({name: wanted.partitions})
                log.info("%s: %d partitions, had %d", name, wanted.partitions, count)
            elif count > wanted.partitions:
                log.warning("%s has %d partitions, more than declared: left alone", name, count)
            resource = ConfigResource(ConfigResourceType.TOPIC, name, wanted.config)
            admin.alter_configs([resource], raise_on_unknown=False)


@contextmanager
def admin_client(kafka: KafkaSettings, timeout_ms: int) -> Iterator[Any]:
    """An admin client whose errors are raised as BrokerError."""
    if not listens(kafka):
        raise BrokerAway(
            f"no broker at {kafka.bootstrap_servers}. Is Kafka running, and does "
            "HVD_KAFKA_BOOTSTRAP_SERVERS name it?"
        )
    admin: Any = None
    try:
        admin = open_admin(kafka, "topics", timeout_ms)
        yield admin
    except AWAY as error:
        away = admin is None or _is_transient(error)
        kind, what = (BrokerAway, "does not yet") if away else (BrokerError, "cannot")
        raise kind(f"Kafka at {kafka.bootstrap_servers} {what} hold the topics: {error}") from error
    finally:
        close(admin)


def _is_transient(error: Exception) -> bool:
    """Whether a starting or stopping broker, or one with too few replicas yet, raises it."""
    transient = isinstance(error, OSError | InvalidReplicationFactorError)
    return transient or (isinstance(error, KafkaError) and bool(error.retriable))


def _create(admin: Any, name: str, topic: Declared) -> None:
    new = NewTopic(name, topic.partitions, topic.replicas, topic_configs=topic.config)
    try:
        admin.create_topics([new])
        log.info("created topic %s", name)
    except TopicAlreadyExistsError:
        pass  # another process was faster
    except KafkaError as error:
        if _is_transient(error):
            raise
        raise BrokerError(
            f"topic {name} is missing and this process may not create it ({error}): "
            f"kafka-topics.sh --create --topic {name} --config "
            f"{CLEANUP}={topic.config.get(CLEANUP)}"
        ) from error


def settings_of(admin: Any, topics: Iterable[Topic] = TOPICS) -> dict[str, dict[str, str]]:
    """Settings by topic, as far as the broker reports them."""
    resources = [ConfigResource(ConfigResourceType.TOPIC, topic.name) for topic in topics]
    try:
        answer = admin.describe_configs(resources, config_filter="all")
    except KafkaError as error:
        log.warning("the broker does not report settings of its topics (%s); continuing", error)
        return {}
    return {
        name: {
            key: str(entry["value"])
            for key, entry in settings.items()
            if entry["value"] is not None
        }
        for name, settings in answer.get("topic", {}).items()
    }


def _repair(admin: Any, kafka: KafkaSettings, topic: Topic, settings: Mapping[str, str]) -> None:
    retention = int(settings.get(RETENTION, "-1"))
    if topic is DRAFTS and 0 <= retention < SHORT_MS:
        log.warning(
            "topic %s keeps records for %d s only: a learner away for longer loses the rest",
            topic.name, retention // 1_000,
        )  # fmt: skip
    wrong = {}
    if settings.get(CLEANUP, topic.cleanup) != topic.cleanup:
        wrong[CLEANUP] = topic.cleanup, ""
    if not topic.compacted and 0 < retention < int(settings.get(SEGMENT, "0")):
        why = f", but Kafka does not delete the active segment, and {RETENTION} is {retention}"
        wrong[SEGMENT] = str(retention), why
    for name, (value, why) in wrong.items():
        problem = f"topic {topic.name} has {name}={settings[name]}{why}"
        log.warning("%s: set to %s", problem, value)
        resource = ConfigResource(ConfigResourceType.TOPIC, topic.name, {name: value})
        try:
            admin.alter_configs([resource])
        except KafkaError as error:
            if _is_transient(error):
                raise
            refused = (
                f"{problem} and this learner may not change it ({error}): kafka-configs.sh "
                f"--bootstrap-server {kafka.bootstrap_servers} --alter --topic {topic.name} "
                f"--add-config {name}={value}"
            )
            if name == CLEANUP:
                raise BrokerError(refused) from error
            log.warning("%s", refused)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 if all is as declared, 2 for an error that a person must fix."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("kafka").setLevel(logging.ERROR)
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m learner.topics FILE\n")
        return 2
    try:
        declare(KafkaSettings.load(), read(Path(arguments[0])))
    except HvdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
