"""A log line as JSON is one object with fields; a fault of every step is told once a minute."""

from __future__ import annotations

import io
import json
import logging

import pytest

from decoder.limited_log import INTERVAL_S, LimitedLog
from learner.log_lines import JsonLines


def said(message: str, *given: object, error: Exception | None = None) -> dict[str, object]:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines())
    exc = (type(error), error, None) if error is not None else None
    handler.handle(logging.LogRecord("learner.loop", 20, __file__, 1, message, given, exc))
    (line,) = out.getvalue().splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def test_what_a_message_names_is_a_field() -> None:
    line = said("scope %s: version %d published, number %d", "s1", 3, 2_000_004)
    assert line["message"] == "scope s1: version 3 published, number 2000004"
    assert (line["scope"], line["version"], line["number"]) == ("s1", 3, 2_000_004)
    assert (line["level"], line["logger"]) == ("INFO", "learner.loop")


@pytest.mark.parametrize(
    ("message", "given", "fields"),
    [
        ("scope %s: %s %s", ("s1", "version 3", "promoted"), {"scope": "s1"}),
        ("version %d plays %.0f%%", (2, 10.0), {"version": 2}),
        ("no place at all", (), {}),
        ("scope %s\nand more", ("a\nb",), {"scope": "a\nb"}),
    ],
)
def test_whatever_is_said_is_one_line(
    message: str, given: tuple[object, ...], fields: dict[str, object]
) -> None:
    line = said(message, *given)
    assert fields.items() <= line.items() and line["message"] == message % given


def test_an_exception_stays_on_its_line() -> None:
    assert "ValueError: two\nlines" in str(
        said("failed", error=ValueError("two\nlines"))["exc_info"]
    )


def test_each_kind_is_told_once_a_minute_with_what_it_stands_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    limited_log = LimitedLog(clock=lambda: now[0])
    for _ in range(100):
        now[0] += 1.0
        try:
            raise ValueError("of a cache")
        except ValueError:
            limited_log.exception("choosing failed")
    for error in ("one", "another"):
        limited_log.warning("weights are gone: %s", error)
    told = [r.getMessage() for r in caplog.records]
    assert told == [
        "choosing failed",
        f"choosing failed ({int(INTERVAL_S) - 1} more since the last line)",
        "weights are gone: one",
    ]
    assert [r.levelno for r in caplog.records] == [logging.ERROR, logging.ERROR, logging.WARNING]
    assert "ValueError: of a cache" in caplog.text and caplog.text.count("Traceback") == 2
