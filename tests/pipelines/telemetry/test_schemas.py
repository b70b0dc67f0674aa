"""The published schemas are the code's, real records keep them, and changes only add."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from decoder.contracts.bundle import Header
from decoder.contracts.errors import ContractError, EventRefused
from decoder.contracts.events import COLUMNS, LIMITS, decode_batch, encode_batch
from decoder.contracts.features import SCHEMA_ID
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DEAD, DRAFTS, LEASE, POLICY, TOPICS
from pipelines.telemetry.schemas import breaks, broken, files, publish
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.pipelines.telemetry.conftest import folder_of, lying

FOLDER = folder_of("deploy") / "schemas"
FILES = files()
SCHEMAS = {name.removesuffix(".json"): json.loads(text) for name, text in FILES.items()}
KEEPS = {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
RECORD = json.loads(encode_batch([EVENT, PLAIN], ORIGIN, 3))


def metadata(bundle: bytes) -> dict[str, Any]:
    header = json.loads(bundle[8 : 8 + int.from_bytes(bundle[:8], "little")])
    return json.loads(header["__metadata__"]["policy"])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_published_file_is_what_the_code_says(name: str) -> None:
    said = "run: hvd telemetry schemas"
    assert (FOLDER / name).read_text(encoding="utf-8") == FILES[name], said
    Draft202012Validator.check_schema(SCHEMAS[name.removesuffix(".json")])
    assert (FOLDER / "released" / name).exists() and broken(FOLDER, FILES) == [], "only added to"


def test_real_records_keep_their_schemas(written: KafkaSettings) -> None:
    seen: set[str] = set()
    for topic, records in lying(written).items():
        for record in records:
            headers = {key: value.decode() for key, value in record.headers}
            features = SCHEMA_ID if topic in (DRAFTS.name, POLICY.name) else None
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

TABLE = ("$defs", "DraftColumns")
AT = (*TABLE, "properties")
LEN = SCHEMAS[DRAFTS.name]["$defs"]["DraftColumns"]["properties"]["draft_len"]
NEEDED = SCHEMAS[DRAFTS.name]["$defs"]["DraftColumns"]["required"]


@pytest.mark.parametrize(
    ("path", "to", "said"),
    [
        ((), {}, ""),
        (AT, {"probability": {"type": "array", "items": {"type": "number"}}}, ""),
        ((*AT, "draft_len"), {"description": "in other words"}, ""),
        (AT, {"draft_len": ..., "length": LEN}, "draft_len is gone, or has another name"),
        ((*AT, "draft_len", "items"), {"type": "number"},
         "columns.draft_len.items.type went from integer to number"),
        ((*AT, "draft_len", "items"), {"maximum": 9}, "maximum went from 512 to 9"),
        ((*AT, "label", "items"), {"enum": ["verified"]}, "label.items.enum went"),
        (TABLE, {"required": [*NEEDED, "new"]}, "new must be there now"),
        (TABLE, {"required": NEEDED[1:]}, "need no longer be there"),
        ((), {"additionalProperties": False}, "additionalProperties went from None to False"),
    ],
)  # fmt: skip
def test_a_property_may_come_and_nothing_else_may_change(
    path: tuple[str, ...], to: dict[str, Any], said: str
) -> None:
    before = SCHEMAS[DRAFTS.name]
    part = schema = copy.deepcopy(before)
    for key in path:
        part = part[key]
    for key, value in to.items():
        part[key] = value
        if value is ...:
            del part[key]
    told = breaks(before, schema)
    assert len(told) == bool(said) and said in "".join(told)


def test_a_schema_that_is_no_longer_made_is_missed_but_for_one_that_still_lies_there(
    tmp_path: Path,
) -> None:
    publish(tmp_path, release=True)
    rest = {name: text for name, text in FILES.items() if name != f"{LEASE.name}.json"}
    assert broken(tmp_path, rest) == []  # as an id of features that events of before name
    (tmp_path / f"{LEASE.name}.json").unlink()
    assert broken(tmp_path, rest) == [f"{LEASE.name}.json: nothing keeps it any more"]
    spoilt = {**SCHEMAS[LEASE.name], "required": ["holder", "term", "beat", "town"]}
    (tmp_path / "released" / f"{LEASE.name}.json").write_text(json.dumps(spoilt))
    with pytest.raises(ContractError, match="town need no longer be there"):
        publish(tmp_path)
