"""Topics are made, mended, or refused with the command that would mend them."""

from __future__ import annotations

from typing import Any

import pytest
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient, NewTopic
from kafka.errors import TopicAuthorizationFailedError

from decoder.contracts.errors import BrokerError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, POLICY, TOPICS
from learner.topics import BrokerAway, make_right
from pipelines.machine import free_port
from tests.learner.conftest import Broker


def set_as(kafka: KafkaSettings, name: str) -> dict[str, Any]:
    admin = KafkaAdminClient(**kafka.client_options())
    told = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    admin.close()
    return {key: entry["value"] for key, entry in told["topic"][name].items()}


def test_topics_are_made_and_left_alone(bare_broker: Broker) -> None:
    for _ in range(2):
        make_right(bare_broker.kafka, {"retention.bytes": "1000000"})
    for topic in TOPICS:
        assert set_as(bare_broker.kafka, topic.name)["cleanup.policy"] == topic.cleanup
    assert set_as(bare_broker.kafka, DRAFTS.name)["retention.bytes"] == "1000000"
    assert "retention.bytes" not in set_as(bare_broker.kafka, POLICY.name)


def test_a_policy_topic_that_forgets_is_mended(bare_broker: Broker) -> None:
    admin = KafkaAdminClient(**bare_broker.kafka.client_options(), bootstrap_timeout_ms=20_000)
    admin.create_topics([NewTopic(POLICY.name, 1, -1, topic_configs={"cleanup.policy": "delete"})])
    admin.close()
    make_right(bare_broker.kafka)
    assert set_as(bare_broker.kafka, POLICY.name)["cleanup.policy"] == "compact"


def test_where_it_may_not_mend_it_names_the_command(
    bare_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = KafkaAdminClient(**bare_broker.kafka.client_options(), bootstrap_timeout_ms=20_000)
    admin.create_topics([NewTopic(DRAFTS.name, 1, -1, topic_configs={"cleanup.policy": "compact"})])
    admin.close()

    def refused(*_: object) -> None:
        raise TopicAuthorizationFailedError(DRAFTS.name)

    monkeypatch.setattr(KafkaAdminClient, "alter_configs", refused)
    with pytest.raises(BrokerError, match=r"kafka-configs.sh .*--add-config cleanup.policy=delete"):
        make_right(bare_broker.kafka)


def test_a_broker_that_is_away_is_another_matter() -> None:
    with pytest.raises(BrokerAway, match="no broker"):
        make_right(KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"))
