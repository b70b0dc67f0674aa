"""``python -m learner.declared FILE``: the topics as a file says, on whatever broker there is.

The learner makes what is missing by itself, with one partition and the broker's own retention.
Whoever runs a fleet declares more than that, and lets no learner make topics. The file has a table
a topic: ``partitions``, ``replicas`` (-1: the broker's default), and ``config`` in Kafka's words.
"""

from __future__ import annotations

import logging
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from kafka.admin import ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import TopicAlreadyExistsError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from decoder.contracts.errors import BrokerError, HvdError, SettingsError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import TOPICS
from decoder.kafka.clients import AWAY, close, open_admin
from learner.topics import CLEANUP, RETENTION, SEGMENT, SEGMENT_MS

log = logging.getLogger(__name__)

REQUEST_MS: Final = 30_000


class Declared(BaseModel):
    """One topic; what is not named is the broker's own choice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partitions: Annotated[int, Field(ge=1, le=10_000)] = 1
    replicas: Annotated[int, Field(ge=-1, le=1_000)] = -1
    config: dict[str, str] = Field(default_factory=dict)


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
        if topic.compacted and told[topic.name].partitions != 1:
            raise SettingsError(f"{path}: {topic.name} has one order, so one partition.")
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
    admin: Any = None
    try:
        admin = open_admin(kafka, "topics", REQUEST_MS)
        there = set(admin.list_topics())
        for name, topic in topics.items():
            if name not in there:
                new = NewTopic(name, topic.partitions, topic.replicas, topic_configs=topic.config)
                try:
                    admin.create_topics([new])
                except TopicAlreadyExistsError:
                    continue  # another learner's start was quicker
                log.info("made %s with %d partitions", name, topic.partitions)
        _mend(admin, {name: topic for name, topic in topics.items() if name in there})
    except AWAY as error:
        raise BrokerError(
            f"Kafka at {kafka.bootstrap_servers} cannot hold the topics: {error}"
        ) from error
    finally:
        close(admin)


def _mend(admin: Any, topics: Mapping[str, Declared]) -> None:
    if not topics:
        return  # asked for none, a broker describes all
    for told in admin.describe_topics(list(topics)):
        name, has = told["name"], len(told["partitions"])
        if has < topics[name].partitions:
            admin.create_partitions({name: topics[name].partitions})
            log.info("%s: %d partitions, had %d", name, topics[name].partitions, has)
        elif has > topics[name].partitions:
            log.warning("%s has %d partitions, more than declared: left alone", name, has)
    resources = [
        ConfigResource(ConfigResourceType.TOPIC, name, topic.config)
        for name, topic in topics.items()
    ]
    admin.alter_configs(resources, raise_on_unknown=False)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 once all is as declared, 2 for what a person has to mend."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("kafka").setLevel(logging.ERROR)
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m learner.declared FILE\n")
        return 2
    try:
        declare(KafkaSettings.load(), read(Path(arguments[0])))
    except HvdError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
