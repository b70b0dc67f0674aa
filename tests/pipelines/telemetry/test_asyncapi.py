"""The AsyncAPI description keeps AsyncAPI's own schema, and what it refers to is there.

The schema lies beside this file as its makers publish it: ``3.0.0-without-$id.json`` of the npm
package ``@asyncapi/specs`` 6.11.1 (Apache License 2.0).
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from decoder.contracts.topics import DRAFTS
from tests.pipelines.telemetry.conftest import folder_of

SCHEMA = json.loads(
    gzip.decompress(Path(__file__).with_name("asyncapi-3.0.0.json.gz").read_bytes())
)
FOLDER = folder_of("deploy") / "schemas"
PUBLISHED = json.loads((FOLDER / "asyncapi.json").read_text(encoding="utf-8"))
KEEPS = Draft7Validator(SCHEMA)


def test_what_is_published_is_asyncapi() -> None:
    assert [error.message for error in KEEPS.iter_errors(PUBLISHED)] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("asyncapi",), "2.6.0"),
        (("info", "version"), None),
        (("channels", DRAFTS.name, "adress"), DRAFTS.name),
        (("operations", f"worker-send-{DRAFTS.name}", "action"), "write"),
        (("channels", DRAFTS.name, "bindings", "kafka", "partitions"), 0),
        (("components", "messages", DRAFTS.name, "headers"), 1),
    ],
    ids=lambda told: told[-1] if isinstance(told, tuple) else "",
)
def test_what_is_not_asyncapi_is_refused(path: tuple[str, ...], value: Any) -> None:
    spoilt = copy.deepcopy(PUBLISHED)
    part = spoilt
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert not KEEPS.is_valid(spoilt)


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from references(each)


def test_whatever_is_referred_to_is_there() -> None:
    found = set(references(PUBLISHED))
    assert len(found) > len(PUBLISHED["channels"])
    for reference in found:
        file, _, pointer = reference.partition("#/")
        there = json.loads((FOLDER / file).read_text(encoding="utf-8")) if file else PUBLISHED
        for key in pointer.split("/") if pointer else ():
            there = there[key]
        assert there
