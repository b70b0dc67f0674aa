"""One AsyncAPI 3 description of the topics: who writes what, under which key and headers.

Payloads are the files of ``schemas`` beside it.
"""

from __future__ import annotations

from typing import Any, Final

from decoder.contracts.signature import HEADER
from decoder.contracts.topics import (
    DEAD,
    DRAFTS,
    LEASE,
    POLICY,
    STATUS,
    TOPICS,
    TRIALS,
    Topic,
)

JSON_SCHEMA: Final = "application/schema+json;version=draft-2020-12"
WRITERS: Final = {
    DRAFTS: ("worker",),
    DEAD: ("learner",),
    POLICY: ("learner",),
    STATUS: ("worker", "learner"),
    LEASE: ("learner",),
    TRIALS: ("worker",),
}
READERS: Final = {
    DRAFTS: ("learner",),
    POLICY: ("worker", "learner"),
    STATUS: ("learner",),
    LEASE: ("learner",),
    TRIALS: ("learner",),
}
"""Analysts and pages read all of them."""
CARRIED: Final = {
    POLICY: ("application/octet-stream", "A safetensors file; the schema is of its metadata."),
    DEAD: ("application/octet-stream", "The refused record as it came."),
}

SOMETIMES: Final = {
    POLICY: {
        HEADER: {
            "type": "string",
            "description": "Where a key is set: HMAC-SHA256 under it, in hexadecimal digits, over "
            "the length of the record's key in decimal digits, a colon, the key, and the value "
            "behind a plus, or a minus where there is none.",
        }
    }
}
"""Headers that a record may have beside those of its topic."""


def description() -> dict[str, Any]:
    """The document."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Hybrid verified decoding: telemetry and policies",
            "version": "2.0.0",
            "description": "Topics of a fleet of serving workers and what learns from them. "
            "Within v2 fields are only added. What each field means: docs/telemetry.md.",
        },
        "defaultContentType": "application/json",
        "channels": {topic.name: _channel(topic) for topic in TOPICS},
        "operations": {
            f"{who}-{action}-{topic.name}": {
                "action": action,
                "channel": {"$ref": f"#/channels/{topic.name}"},
                "title": f"A {who} {verb} {topic.name}",
            }
            for action, verb, table in (
                ("send", "writes", WRITERS),
                ("receive", "reads", READERS),
            )
            for topic, names in table.items()
            for who in names
        },
        "components": {"messages": {topic.name: _message(topic) for topic in TOPICS}},
    }


def _channel(topic: Topic) -> dict[str, Any]:
    return {
        "address": topic.name,
        "messages": {"record": {"$ref": f"#/components/messages/{topic.name}"}},
        "bindings": {
            "kafka": {
                "topic": topic.name,
                "topicConfiguration": {"cleanup.policy": [topic.cleanup]},
                "bindingVersion": "0.5.0",
            }
        },
    }


def _message(topic: Topic) -> dict[str, Any]:
    schema = {"schemaFormat": JSON_SCHEMA, "schema": {"$ref": f"{topic.name}.json"}}
    names = {name: {"type": "string", "const": value.decode()} for name, value in topic.headers}
    content, summary = CARRIED.get(topic, ("application/json", ""))
    told: dict[str, Any] = {"name": topic.name, "contentType": content}
    if summary:
        told["summary"] = summary
    if topic is DEAD:
        told["headers"] = schema
    else:
        told["headers"] = {
            "type": "object",
            "properties": names | SOMETIMES.get(topic, {}),
            "required": list(names),
        }
        told["payload"] = schema
    key = {"type": "string", "description": topic.key}
    return told | {"bindings": {"kafka": {"key": key, "bindingVersion": "0.5.0"}}}
