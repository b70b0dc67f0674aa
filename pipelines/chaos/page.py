"""The tables of ``docs/reliability.md`` that these commands write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import SettingsError
from pipelines.chaos.soak import slopes

PAGE: Final = Path(__file__).parents[2] / "docs" / "reliability.md"


def chaos_table(found: Mapping[str, Any]) -> str:
    """A row a trouble, in Markdown, and where and when."""
    rows = [
        (
            each["name"],
            ", ".join(f"{name} {seconds:.0f} s" for name, seconds in each["back_s"].items()) or "-",
            each["requests"],
            each["errors"],
            each["waited"],
            f"{each['slowest_s']:.0f} s",
            _lost(each["account"]),
            "; ".join(sorted(set(each["faults"]))) or "none",
        )
        for each in found["incidents"]
    ]
    head = (
        "trouble", "back after", "requests", "errors", "refused, then answered", "slowest answer",
        "events lost", "faults",
    )  # fmt: skip
    figures = "".join(
        f"{each['name'].capitalize()}: "
        f"{', '.join(f'{name} {value:g}' for name, value in each['figures'].items())}.\n"
        for each in found["incidents"]
        if each["figures"]
    )
    events = found["events"]
    return (
        f"{_table(head, rows)}\n{figures}"
        f"{found['date']}, {found['machine']}, load {found['load']}. Worker: {found['worker']}. "
        f"Seed {found['seed']}. Events made {events['made']}, seen on the topic "
        f"{events['on the topic']}, counted by the learner {events['counted']}; "
        f"{found['publications']} publications.\n"
    )


def _lost(account: Mapping[str, int]) -> str:
    """By the worker's count, and of the topic where that says otherwise."""
    doubtful = f", {account['in_doubt']} in doubt" if account["in_doubt"] > 0 else ""
    differs = account["missing"] != account["lost"]
    missing = f"; {account['missing']} are missing" if differs else ""
    return f"{account['lost']}{doubtful}{missing}"


def soak_table(found: Mapping[str, Any]) -> str:
    """A row a figure, and where and when."""
    rows = [
        (
            name,
            f"{each.level:.1f}",
            f"{each.hourly:+.2f} ({each.low:+.2f} to {each.high:+.2f})",
            each.verdict,
        )
        for name, each in slopes(found).items()
    ]
    head = ("figure", "level", "change an hour (95%)", "verdict")
    return (
        f"{_table(head, rows)}\n"
        f"{found['date']}, {found['machine']}. {found['minutes']:.0f} minutes, "
        f"{found['requests']} requests, {found['errors']} failed, {found['wrong']} answered "
        f"wrongly, {len(found['restarts'])} restarts.\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def write(name: str, table: str, page: Path = PAGE) -> None:
    """Put ``table`` in the place that ``page`` has for it.

    Raises:
        SettingsError: the page is not there, or has no such place.
    """
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"{page} cannot be read: run --write-docs in a checkout of the project."
        ) from error
    place = re.compile(f"(?<={re.escape(marks[0])}\n).*?(?={re.escape(marks[1])})", re.DOTALL)
    text, found = place.subn(lambda _: table, text)
    if found != 1:
        raise SettingsError(f"{page} has no place between {marks[0]} and {marks[1]}.")
    page.write_text(text, encoding="utf-8")
