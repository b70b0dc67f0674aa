"""What is written names its schema and keeps it."""

from __future__ import annotations

from decoder.contracts.features import SCHEMA_ID
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, POLICY
from tests.pipelines.telemetry.conftest import lying


def test_every_record_names_its_schema(written: KafkaSettings) -> None:
    for topic, records in lying(written).items():
        assert records, f"nothing on {topic}"
        for record in records:
            headers = dict(record.headers)
            assert headers["schema"] == topic.encode()
            features = SCHEMA_ID.encode() if topic in (DRAFTS.name, POLICY.name) else None
            assert headers.get("schema_id") == features
