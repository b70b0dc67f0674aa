"""Topics are made, mended, or refused with the command that would mend them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient, NewTopic
from kafka.errors import (
    InvalidReplicationFactorError,
    KafkaTimeoutError,
    NotControllerError,
    TopicAuthorizationFailedError,
)

from decoder.contracts.errors import BrokerError, SettingsError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, LEASE, POLICY, STATUS, TOPICS
from learner.topics import (
    BrokerAway,
    declare,
    ensure_topics,
    read,
    wait_for_topics,
)
from pipelines import doctor
from pipelines.doctor import harmful
from pipelines.machine import free_port
from tests.learner.conftest import Broker

FLEET = Path(__file__).parents[2] / "deploy" / "kafka" / "topics.toml"


def set_as(kafka: KafkaSettings, name: str) -> dict[str, Any]:
    admin = KafkaAdminClient(**kafka.client_options())
    told = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    admin.close()
    return {key: entry["value"] for key, entry in told["topic"][name].items()}


def make(broker: Broker, name: str, **configs: str) -> None:
    """A topic as somebody else made it."""
    admin = KafkaAdminClient(**broker.kafka.client_options(), bootstrap_timeout_ms=20_000)
    told = {key.replace("_", "."): value for key, value in configs.items()}
    admin.create_topics([NewTopic(name, 1, -1, topic_configs=told)])
    admin.close()


def test_topics_are_created_once(bare_broker: Broker) -> None:
    for _ in range(2):
        ensure_topics(bare_broker.kafka, {"retention.bytes": "1000000"})
    for topic in TOPICS:
        assert set_as(bare_broker.kafka, topic.name)["cleanup.policy"] == topic.cleanup
    assert set_as(bare_broker.kafka, DRAFTS.name)["retention.bytes"] == "1000000"
    assert "retention.bytes" not in set_as(bare_broker.kafka, POLICY.name)
    assert set_as(bare_broker.kafka, POLICY.name)["segment.ms"] == "3600000"


def test_a_harmful_topic_setting_is_reported(
    bare_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = bare_broker.kafka
    assert harmful(kafka) == []
    make(bare_broker, POLICY.name, cleanup_policy="compact,delete", max_message_bytes="65536")
    make(bare_broker, DRAFTS.name, cleanup_policy="delete", retention_ms="60000")
    make(bare_broker, LEASE.name, cleanup_policy="compact", min_insync_replicas="2")
    named = harmful(kafka)
    found = " ".join(named)
    for said in (
        f"{POLICY.name} has cleanup.policy=compact,delete and loses serving policies",
        f"{POLICY.name} has max.message.bytes=65536",
        f"{DRAFTS.name} has retention.ms=60000",
        f"{LEASE.name} has min.insync.replicas=2 and 1 replicas",
        f"{STATUS.name} is missing",
    ):
        assert said in found
    assert len(named) == 8, "four are missing"
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    check = doctor.topics()
    assert not check.ok and not check.blocks and STATUS.name in check.found and check.fix


def test_created_and_declared_topics_have_no_harmful_settings(
    bare_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_topics(bare_broker.kafka)
    assert harmful(bare_broker.kafka) == []
    declare(bare_broker.kafka, read(FLEET))
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", bare_broker.kafka.bootstrap_servers)
    assert doctor.topics().ok
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{free_port()}")
    assert doctor.topics().ok, "that nobody answers is another check's to say"


def test_a_wrong_clean_up_policy_is_repaired_or_the_command_is_named(
    bare_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(bare_broker, POLICY.name, cleanup_policy="delete")
    ensure_topics(bare_broker.kafka)
    assert set_as(bare_broker.kafka, POLICY.name)["cleanup.policy"] == "compact"
    admin = KafkaAdminClient(**bare_broker.kafka.client_options())
    admin.delete_topics([DRAFTS.name])
    admin.close()
    make(bare_broker, DRAFTS.name, cleanup_policy="compact")
    monkeypatch.setattr(KafkaAdminClient, "alter_configs", refused)
    with pytest.raises(BrokerError, match=r"kafka-configs.sh .*--add-config cleanup.policy=delete"):
        ensure_topics(bare_broker.kafka)


def refused(*_: object) -> None:
    raise TopicAuthorizationFailedError("this one")


def test_segments_longer_than_the_retention_are_repaired_or_reported(
    bare_broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that says an hour and, by its segments, means a week."""
    hour = {"cleanup_policy": "delete", "retention_ms": "3600000", "segment_ms": "604800000"}
    make(bare_broker, STATUS.name, **hour)
    with monkeypatch.context() as patched:  # the learner goes on where it may not mend it
        patched.setattr(KafkaAdminClient, "alter_configs", refused)
        ensure_topics(bare_broker.kafka)
    assert "--add-config segment.ms=3600000" in caplog.text
    ensure_topics(bare_broker.kafka)
    found = set_as(bare_broker.kafka, STATUS.name)
    assert (found["segment.ms"], found["retention.ms"]) == ("3600000", "3600000")
    assert "does not delete the active segment" in caplog.text
    caplog.clear()
    ensure_topics(bare_broker.kafka)
    assert "segment" not in caplog.text


@pytest.mark.parametrize("asked", ["list_topics", "create_topics"])
def test_transient_errors_are_retried(
    bare_broker: Broker, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A cluster that is about to start, or hands over its controller, says such things."""
    kinds = (KafkaTimeoutError, NotControllerError, InvalidReplicationFactorError, OSError)
    through, first = getattr(KafkaAdminClient, asked), [kind("not now") for kind in kinds]

    def late(admin: KafkaAdminClient, *args: object) -> object:
        if first:
            raise first.pop()
        return through(admin, *args)

    monkeypatch.setattr("learner.topics.RETRY_SECONDS", 0.01)
    monkeypatch.setattr(KafkaAdminClient, asked, late)
    wait_for_topics(bare_broker.kafka, threading.Event())
    assert not first and set_as(bare_broker.kafka, POLICY.name)["cleanup.policy"] == "compact"


def test_a_setting_without_a_value_is_skipped(
    bare_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"topic": {DRAFTS.name: {"retention.ms": {"value": None}}}}
    monkeypatch.setattr(KafkaAdminClient, "describe_configs", lambda *_, **__: told)
    ensure_topics(bare_broker.kafka)
    with pytest.raises(BrokerAway, match="no broker"):  # which is another matter
        ensure_topics(KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"))


def test_topics_are_as_declared(bare_broker: Broker) -> None:
    declared = read(FLEET)
    few = declared[DRAFTS.name].model_copy(update={"partitions": 2})
    fewer = {**declared, DRAFTS.name: few}
    declare(bare_broker.kafka, fewer)
    declare(bare_broker.kafka, declared)
    admin = KafkaAdminClient(**bare_broker.kafka.client_options())
    told = {t["name"]: len(t["partitions"]) for t in admin.describe_topics(list(declared))}
    admin.close()
    assert told == {name: topic.partitions for name, topic in declared.items()}
    for name, topic in declared.items():
        assert topic.config.items() <= set_as(bare_broker.kafka, name).items()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('"hvd.lease.v2"', '"hvd.lease"'), "look at hvd.lease, hvd.lease.v2"),
        (('"delete"', '"compact"'), "cleanup.policy of hvd.drafts.v2 must be 'delete'"),
        (("partitions = 12", "partitions = 0"), "wrong at hvd.drafts.v2.partitions"),
        (("partitions = 12", "parts = 12"), "wrong at hvd.drafts.v2.parts"),
        (("[", "("), "declares no topics"),
        (('"604800000"', '"3600000"'), "set segment.ms to at most 3600000"),
        (('"604800000"', '"a week"'), "retention.ms and segment.ms of hvd.drafts.v2"),
    ],
)
def test_an_invalid_topics_file_is_refused(
    change: tuple[str, str], told: str, tmp_path: Path
) -> None:
    file = tmp_path / "topics.toml"
    file.write_text(FLEET.read_text().replace(*change))
    with pytest.raises(SettingsError, match=told):
        read(file)


def test_a_minimum_of_three_partitions_is_declared(tmp_path: Path) -> None:
    file = tmp_path / "topics.toml"
    file.write_text(FLEET.read_text().replace("partitions = 1\n", "partitions = 3\n"))
    assert min(topic.partitions for topic in read(file).values()) == 3
