"""How far long work is, for who looks at a bar and for who reads a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipelines.progress import LINE_SECONDS, Shown


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_where_no_bar_can_be_drawn_a_line_comes_now_and_then(clock: Clock) -> None:
    log = io.StringIO()
    with Shown(Console(file=log, width=20, get_time=clock)) as shown:
        for done in range(7):  # the first comes after a while: short work says nothing
            clock.now = done * LINE_SECONDS / 2
            shown.step("recording [chat], tokens", 1000 * done, 6000)
    assert log.getvalue().splitlines() == [
        "recording [chat], tokens: 2,000 of 6,000, about 1 min left",
        "recording [chat], tokens: 4,000 of 6,000, about 1 min left",
        "recording [chat], tokens: 6,000 of 6,000",
    ]


def test_a_second_stage_has_a_pace_of_its_own(clock: Clock) -> None:
    log = io.StringIO()
    with Shown(Console(file=log, width=20, get_time=clock)) as shown:
        for stage, minutes in (("first", 1), ("second", 2)):
            for done in range(6):
                shown.step(stage, done, 5)
                clock.now += 60.0 * minutes
    lines = log.getvalue().splitlines()
    assert "first: 3 of 5, about 2 min left" in lines
    assert "first: 5 of 5" in lines
    assert "second: 3 of 5, about 4 min left" in lines


def test_a_terminal_gets_a_bar_and_no_lines(clock: Clock) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100, get_time=clock)
    with Shown(console) as shown:
        clock.now = LINE_SECONDS
        shown.step("reading [a/b]", 1, 2)
    assert "reading [a/b]" in terminal.getvalue() and "1/2" in terminal.getvalue()
    assert "1 of 2" not in terminal.getvalue()
