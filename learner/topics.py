"""The topics as the project needs them: made where they are missing, put right where they are not.

A draft topic that is compacted keeps one record a worker; a policy topic that is not forgets the
champion. Both work until a worker starts and finds nothing.

``python -m learner.topics FILE``: the topics as a file says, on whatever broker there is. The
learner makes what is missing by itself, with one partition and the broker's own retention. Whoever
runs a fleet declares more than that, and lets no learner make topics. The file has a table a topic:
``partitions``, ``replicas`` (-1: the broker's default), and ``config`` in Kafka's words.
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
SEGMENT_MS: Final = 604_800_000
"""Kafka's own ``segment.ms``, a week, which is its ``retention.ms`` as well."""
SHORT_MS: Final = 3_600_000
"""A learner that is away for an hour is not unusual: a topic that keeps less is spoken of."""
COMPACTED_SEGMENT: Final = {SEGMENT: "3600000"}
"""An hour, for Kafka compacts no segment that it still writes: in its own week a lease alone makes
150,000 records a scope, and whoever starts reads them all."""


class BrokerAway(BrokerError):
    """Nobody answers there yet, or a broker that is not ready."""


class Declared(BaseModel):
    """One topic; what is not named is the broker's own choice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partitions: Annotated[int, Field(ge=1, le=10_000)] = 1
    replicas: Annotated[int, Field(ge=-1, le=1_000)] = -1
    config: dict[str, str] = Field(default_factory=dict)


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
    with reached(kafka, REQUEST_MS) as admin:
        there = set(admin.list_topics())
        for topic in TOPICS:
            if topic.name not in there:
                more = COMPACTED_SEGMENT if topic.compacted else limits or {}
                _create(admin, topic.name, Declared(config={CLEANUP: topic.cleanup, **more}))
        told = settings_of(admin)
        for topic in TOPICS:
            _mend(admin, kafka, topic, told.get(topic.name, {}))


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


def read(path: Path) -> dict[str, Declared]:
    """What ``path`` declares, by topic.

    Raises:
        SettingsError: it cannot be read, leaves a topic out, names another, cleans one up in a
            way that would lose what the project needs, or says an age that Kafka would not keep to.
    """
    try:
        told = TypeAdapter(dict[str, Declared]).validate_python(tomllib.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"{path} is wrong at {where}: {first['msg']}.") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} declares no topics: {error}.") from error
    if told.keys() != (names := {topic.name for topic in TOPICS}):
        wrong = ", ".join(sorted(told.keys() ^ names))
        raise SettingsError(f"{path} must declare our topics, each once: look at {wrong}.")
    for topic in TOPICS:
        cleanup = told[topic.name].config.get(CLEANUP)
        if cleanup != topic.cleanup:
            raise SettingsError(f"{path}: {CLEANUP} of {topic.name} must be {topic.cleanup!r}.")
        _check_age(path, topic.name, told[topic.name].config)
    return told


def _check_age(path: Path, name: str, config: Mapping[str, str]) -> None:
    try:
        kept, segment = (int(config.get(key, SEGMENT_MS)) for key in (RETENTION, SEGMENT))
    except ValueError as error:
        raise SettingsError(f"{path}: {RETENTION} and {SEGMENT} of {name}: {error}.") from error
    if 0 < kept < segment:
        raise SettingsError(
            f"{path}: {name} is to keep records for {kept} ms, but Kafka deletes no segment that "
            f"it still writes, and begins another only after {SEGMENT}={segment}: declare "
            f"{SEGMENT} of {kept} at most."
        )


def declare(kafka: KafkaSettings, topics: Mapping[str, Declared]) -> None:
    """Make what is missing; give what is there the partitions and settings declared.

    Partitions are never taken away, since Kafka cannot, and replicas of what is there are left to
    the tools that move them.

    Raises:
        BrokerError: the broker is away, or refuses.
    """
    with reached(kafka, DECLARE_MS) as admin:
        there = topics.keys() & set(admin.list_topics())
        for name in topics.keys() - there:
            _create(admin, name, topics[name])
        # asked for none, a broker describes all
        for told in admin.describe_topics(sorted(there)) if there else ():
            name, has = told["name"], len(told["partitions"])
            if has < topics[name].partitions:
                admin.create_partitions({name: topics[name].partitions})
                log.info("%s: %d partitions, had %d", name, topics[name].partitions, has)
            elif has > topics[name].partitions:
                log.warning("%s has %d partitions, more than declared: left alone", name, has)
            config = topics[name].config
            resource = ConfigResource(ConfigResourceType.TOPIC, name, config)
            admin.alter_configs([resource], raise_on_unknown=False)


@contextmanager
def reached(kafka: KafkaSettings, patience_ms: int) -> Iterator[Any]:
    """A client, and what it raises as one of our errors."""
    if not listens(kafka):
        raise BrokerAway(
            f"no broker at {kafka.bootstrap_servers}. Is Kafka running, and does "
            "HVD_KAFKA_BOOTSTRAP_SERVERS name it?"
        )
    admin: Any = None
    try:
        admin = open_admin(kafka, "topics", patience_ms)
        yield admin
    except AWAY as error:
        away = admin is None or _passes(error)
        kind, what = (BrokerAway, "does not yet") if away else (BrokerError, "cannot")
        raise kind(f"Kafka at {kafka.bootstrap_servers} {what} hold the topics: {error}") from error
    finally:
        close(admin)


def _passes(error: Exception) -> bool:
    """Whether it is of a broker that starts, ends, or hands over its part: also too few of them for
    the replicas that are wanted."""
    passing = isinstance(error, OSError | InvalidReplicationFactorError)
    return passing or (isinstance(error, KafkaError) and bool(error.retriable))


def _create(admin: Any, name: str, topic: Declared) -> None:
    new = NewTopic(name, topic.partitions, topic.replicas, topic_configs=topic.config)
    try:
        admin.create_topics([new])
        log.info("made topic %s", name)
    except TopicAlreadyExistsError:
        pass  # another process was quicker
    except KafkaError as error:
        if _passes(error):
            raise
        raise BrokerError(
            f"topic {name} is missing and this process may not make it ({error}): kafka-topics.sh "
            f"--create --topic {name} --config {CLEANUP}={topic.config.get(CLEANUP)}"
        ) from error


def settings_of(admin: Any, topics: Iterable[Topic] = TOPICS) -> dict[str, dict[str, str]]:
    """The settings of each topic by name, as far as the broker says them."""
    resources = [ConfigResource(ConfigResourceType.TOPIC, topic.name) for topic in topics]
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
    kept = int(told.get(RETENTION, "-1"))
    if topic is DRAFTS and 0 <= kept < SHORT_MS:
        log.warning(
            "topic %s keeps records for %d s only: a learner away for longer loses the rest",
            topic.name, kept // 1_000,
        )  # fmt: skip
    wrong = {}
    if told.get(CLEANUP, topic.cleanup) != topic.cleanup:
        wrong[CLEANUP] = topic.cleanup, ""
    if not topic.compacted and 0 < kept < int(told.get(SEGMENT, "0")):
        why = f", but Kafka deletes no segment that it still writes, and {RETENTION} is {kept}"
        wrong[SEGMENT] = str(kept), why
    for name, (value, why) in wrong.items():
        has = f"topic {topic.name} has {name}={told[name]}{why}"
        log.warning("%s: set to %s", has, value)
        resource = ConfigResource(ConfigResourceType.TOPIC, topic.name, {name: value})
        try:
            admin.alter_configs([resource])
        except KafkaError as error:
            if _passes(error):
                raise
            refused = (
                f"{has} and this learner may not change it ({error}): kafka-configs.sh "
                f"--bootstrap-server {kafka.bootstrap_servers} --alter --topic {topic.name} "
                f"--add-config {name}={value}"
            )
            if name == CLEANUP:
                raise BrokerError(refused) from error
            log.warning("%s", refused)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 once all is as declared, 2 for what a person has to mend."""
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
