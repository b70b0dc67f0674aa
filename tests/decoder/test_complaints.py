"""A fault of every step is told once a minute, and none is lost from the count."""

from __future__ import annotations

import logging

import pytest

from decoder.complaints import PAUSE_S, Complaints


def test_each_kind_is_told_once_a_minute_with_what_it_stands_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    complaints = Complaints(clock=lambda: now[0])
    for _ in range(100):
        now[0] += 1.0
        try:
            raise ValueError("of a cache")
        except ValueError:
            complaints.exception("choosing failed")
    for error in ("one", "another"):
        complaints.warning("weights are gone: %s", error)
    told = [r.getMessage() for r in caplog.records]
    assert told == [
        "choosing failed",
        f"choosing failed ({int(PAUSE_S) - 1} more since this was last said)",
        "weights are gone: one",
    ]
    assert [r.levelno for r in caplog.records] == [logging.ERROR, logging.ERROR, logging.WARNING]
    assert "ValueError: of a cache" in caplog.text and caplog.text.count("Traceback") == 2
