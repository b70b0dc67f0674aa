"""The published schemas are the code's, real records keep them, and changes only add."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from decoder.contracts.bundle import Header
from decoder.contracts.errors import EventRefused
from decoder.contracts.events import decode_batch
from decoder.contracts.features import SCHEMA_ID
from decoder.contracts.fields import COLUMNS, LIMITS
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DEAD, DRAFTS, LESSONS, POLICY, TOPICS
from pipelines.telemetry.schemas import files
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.events import encode_events
from tests.pipelines.telemetry.conftest import folder_of, lying

FOLDER = folder_of("deploy") / "schemas"
FILES = files()
SCHEMAS = {name.removesuffix(".json"): json.loads(text) for name, text in FILES.items()}
KEEPS = {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
RECORD = json.loads(encode_events([EVENT, PLAIN], ORIGIN, 3))


def metadata(bundle: bytes) -> dict[str, Any]:
    header = json.loads(bundle[8 : 8 + int.from_bytes(bundle[:8], "little")])
    return json.loads(header["__metadata__"]["policy"])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_published_file_is_what_the_code_says(name: str) -> None:
    said = "run: python -m tests.docs.reference"
    assert (FOLDER / name).read_text(encoding="utf-8") == FILES[name], said
    Draft202012Validator.check_schema(SCHEMAS[name.removesuffix(".json")])
    if (before := FOLDER / "released" / name).exists():
        released = json.loads(before.read_text(encoding="utf-8"))
        assert not breaks(released, SCHEMAS[name.removesuffix(".json")]), "only added to"


def test_no_released_schema_is_gone() -> None:
    there = {path.name for path in FOLDER.glob("*.json")}  # also of ids of features of before
    assert {path.name for path in (FOLDER / "released").glob("*.json")} <= there


def test_real_records_keep_their_schemas(written: KafkaSettings) -> None:
    seen: set[str] = set()
    for topic, records in lying(written).items():
        for record in records:
            headers = {key: value.decode() for key, value in record.headers}
            featured = topic in (DRAFTS.name, LESSONS.name, POLICY.name)
            features = SCHEMA_ID if featured else None
            assert (headers["schema"], headers.get("schema_id")) == (topic, features)
            reads = {DEAD.name: lambda _, told=headers: told, POLICY.name: metadata}
            if record.value:
                told: Any = reads.get(topic, json.loads)(record.value)
                KEEPS[topic].validate(told)
                seen.add(topic)
            if topic == DRAFTS.name:
                KEEPS[SCHEMA_ID].validate(told["features"])
    assert seen == {topic.name for topic in TOPICS}


@pytest.mark.parametrize("column", sorted(LIMITS))
def test_what_the_reader_refuses_for_its_range_the_schema_refuses(column: str) -> None:
    for end, away in zip(LIMITS[column], (-1, 1), strict=True):
        beyond = math.nextafter(end, away * math.inf) if isinstance(end, float) else end + away
        for value, fits in ((end, True), (beyond, False)):
            record = copy.deepcopy(RECORD)
            record["columns"][column] = [value] * 2
            assert KEEPS[DRAFTS.name].is_valid(record) == fits
            if not fits:
                with pytest.raises(EventRefused):
                    decode_batch(json.dumps(record).encode())


ODD = st.sampled_from([None, -1, 2**70, 1e40, "", "x" * 300, [], {}, [None], ["a"], [-1], True])


@settings(max_examples=200, deadline=None)
@given(field=st.sampled_from(sorted(RECORD)), column=st.sampled_from(COLUMNS), value=ODD)
def test_what_the_schema_refuses_the_reader_refuses(field: str, column: str, value: Any) -> None:
    record = copy.deepcopy(RECORD)
    if field == "columns":
        record["columns"][column] = value
    else:
        record[field] = value
    if not KEEPS[DRAFTS.name].is_valid(record):
        with pytest.raises(EventRefused):
            decode_batch(json.dumps(record).encode())


HEADER = {
    "contract": POLICY.name, "scope": "s", "version": 1, "kind": "payoff", "threshold": 2.0,
    "use_model": True, "model_payoff": 0.0, "publication": 5, "role": "first",
    "schema_id": SCHEMA_ID, "provenance": {},
}  # fmt: skip


@given(field=st.sampled_from(sorted(HEADER)), value=ODD)
def test_a_policy_header_that_is_read_keeps_its_schema(field: str, value: Any) -> None:
    assert KEEPS[POLICY.name].is_valid(HEADER)
    try:
        Header.model_validate_json(json.dumps({**HEADER, field: value}))
    except ValueError:
        assert not KEEPS[POLICY.name].is_valid({**HEADER, field: value})


# --- what is an addition

WORDS = {"$schema", "$id", "$defs", "$ref", "title", "description", "default", "discriminator"}


def said(part: Any, whole: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """What a schema says, by the way to it; the name of a property begins with a dot."""
    if isinstance(part, dict):
        yield path, "there"
        if "$ref" in part:
            yield from said(whole["$defs"][part["$ref"].removeprefix("#/$defs/")], whole, path)
        named = path[-1:] == ("properties",)
        for key, value in part.items():
            if named or key not in WORDS:
                yield from said(value, whole, (*path, f".{key}" if named else key))
    elif isinstance(part, list) and any(isinstance(each, dict) for each in part):
        yield path, "there"
        for number, each in enumerate(part):
            yield from said(each, whole, (*path, str(number)))
    else:
        yield path, part


def breaks(before: Any, now: Any) -> list[Any]:
    """What of ``now`` is no addition to ``before``: only a property may come."""
    old, new = (dict(said(each, each)) for each in (before, now))
    come = (next(p for n in range(len(path)) if (p := path[: n + 1]) not in old)
            for path in new.keys() - old.keys())  # fmt: skip
    lost = [path for path in old if old[path] != new.get(path)]
    return lost + [path for path in come if not path[-1].startswith(".")]
