"""Records of draft events as no worker writes them, each with the reason for its refusal.

``reasons.json`` beside the release's own record holds what release 182b4e1c said of each of them;
"" where it read the record.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

RELEASED: Final = Path(__file__).parent / "released"
RECORD: Final = (RELEASED / "drafts.json").read_bytes()
"""Four events as the release wrote them; the second and the last have no cache draft."""
REASONS: Final[dict[str, str]] = json.loads((RELEASED / "reasons.json").read_text())
DEEP: Final = 100_000

_GONE: Final = object()
_FIELDS: Final[list[tuple[str, Any]]] = [
    ("contract", "hvd.drafts.v1"), ("contract", None), ("contract", ["hvd.drafts.v2"]),
    ("schema_id", "older"), ("schema_id", "s" * 257), ("schema_id", 5),
    ("scope", "../../etc"), ("scope", "s" * 65), ("scope", "any"), ("scope", None),
    ("worker", "w" * 257), ("worker", True), ("life", "1f" * 20), ("life", ""), ("life", "XYZ"),
    ("target", "a/b\nc"), ("target", 1), ("target", _GONE), ("drafter", "d" * 65),
    ("sequence", -1), ("sequence", 2**53 + 1), ("sequence", 10**40), ("sequence", 1.0),
    ("sequence", "1"), ("sequence", True), ("sequence", _GONE),
    ("rows", 2), ("rows", 0), ("rows", -4), ("rows", 4.0), ("rows", True), ("rows", 10**400),
    ("columns", []), ("columns", None), ("columns", "x"), ("columns", {}), ("columns", _GONE),
    ("features", []), ("features", {}), ("features", None), ("features", 3),
    ("source", 5), ("source", {}), ("source", None),
    ("source", {"partition": 1, "offset": 2, "share": 0.5}),
    ("source", {"partition": -1, "offset": 2, "share": 0.5}),
    ("source", {"partition": 1, "offset": 2**54, "share": 0.5}),
    ("source", {"partition": 1, "offset": 2, "share": 0.0}),
    ("source", {"partition": "1", "offset": 2, "share": 0.5}),
    ("source", {"partition": 1, "offset": True, "share": 0.5}),
    ("source", {"partition": 1, "offset": 2.5, "share": 0.5}),
    ("source", {"partition": 1, "offset": 2, "share": "0.5"}),
    ("source", []), ("source", ""), ("source", 0), ("source", False),
    ("more", {"nested": [1, {"deeper": None}]}),
]  # fmt: skip
_WHOLE: Final[list[Any]] = [_GONE, None, "x", 5, {}, [], [[1], [1], [1], [1]], [1, 1, 1], [1] * 5]
"""In the place of a whole column."""
_VALUES: Final[list[Any]] = [
    None, True, False, "4", "", "a" * 65, [1], {"a": 1}, -1, 1.0, 2.5, -0.0, 1e300, 2**31, 2**40,
    2**53 + 1, 2**63, 2**64, 10**30, 10**400, float("nan"), float("inf"), float("-inf"), 1e-300,
]  # fmt: skip
"""In the place of the first value of a column."""
_COLUMNS: Final = (
    "number", "time", "cycle", "choice", "accepted", "draft_len", "model_accepted", "parameter",
    "batch_size", "step_us", "predicted", "share", "arm", "label", "request", "workload",
    "censored", "side",
)  # fmt: skip
_FEATURES: Final = ("score", "log_score", "first_digit")


def _put(part: dict[str, Any], name: str, value: Any) -> None:
    if value is _GONE:
        del part[name]
    else:
        part[name] = value


def _spoilt() -> Iterator[tuple[str, dict[str, Any]]]:
    """The release's record with one thing wrong, by a name that says which."""

    def named(*parts: Any) -> str:
        said = ["gone" if each is _GONE else repr(each) for each in parts]
        return " ".join(
            each if len(each) < 40 else f"{each[:20]}... of {len(each)}" for each in said
        )

    whole = json.loads(RECORD)
    for name, value in _FIELDS:
        record = copy.deepcopy(whole)
        _put(record, name, value)
        yield named(name, value), record
    for part, names in (("columns", _COLUMNS), ("features", _FEATURES)):
        for name in names:
            for value in _WHOLE:
                record = copy.deepcopy(whole)
                _put(record[part], name, value)
                yield named(part, name, value), record
            for value in _VALUES:
                record = copy.deepcopy(whole)
                record[part][name][0] = value
                yield named(part, name, "first", value), record
    for part in ("columns", "features"):
        record = copy.deepcopy(whole)
        record[part]["another"] = [1.0] * 4
        yield f"{part} with another", record
    record = copy.deepcopy(whole)
    record["features"]["score"][1] = 1.0
    yield "features of no draft", record
    for n in range(1, 4):
        record = copy.deepcopy(whole)
        record["columns"]["accepted"][n] = 10
        yield f"accepted of row {n} beyond its draft", record


_BYTES: Final[dict[str, bytes]] = {
    "nothing": b"", "an empty object": b"{}", "no UTF-8": b"\xff\xfe", "cut short": b"[1,2",
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"columns":' * DEEP + b"1" + b"}" * DEEP,
    "a long number": b'{"contract":"hvd.drafts.v2","rows":' + b"9" * 10_000 + b"}",
    "half": RECORD[: len(RECORD) // 2], "twice": RECORD * 2,
    "with a mark": b"\xef\xbb\xbf" + RECORD,
    "UTF-8 broken in a name": RECORD.replace(b'"edits"', b'"ed\xffits"', 1),
    "half a character escaped": RECORD.replace(b'"edits"', b'"\\ud800"', 1),
    "a control character": RECORD.replace(b'"edits"', b'"ed\x01its"', 1),
    "another contract said last": RECORD[:-1] + b',"contract":"hvd.drafts.v1"}',
    "a column twice, the last short": RECORD.replace(b'"columns":{', b'"columns":{"arm":["x"],', 1),
    "a long name": RECORD.replace(b'"edits"', b'"' + b"e" * 10**6 + b'"', 1),
    "a list": b"[" + RECORD + b"]", "null": b"null", "a string": b'"x"',
}  # fmt: skip


def cases() -> dict[str, bytes]:
    """Every record by its name."""
    return {**{name: json.dumps(record).encode() for name, record in _spoilt()}, **_BYTES}


BEYOND_64_BITS: Final = frozenset(
    name for name in REASONS if re.search(r"\d{19}|10{19}\.\.\.", name)
)
