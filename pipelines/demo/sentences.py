"""What a run came to, in three sentences."""

from __future__ import annotations

from typing import Any

from pipelines.demo.summary import Summary
from pipelines.watch.uplift import NAMED


def sentences(summary: Summary) -> list[str]:
    """How fast it was, what learning did, and whether it could be relied on. None claims more than
    the run's intervals bear."""
    return [_speed(summary), _learning(summary), _trust(summary)]


def _speed(summary: Summary) -> str:
    plain = summary.uplift.get("over_plain")
    if plain is None or plain["low"] is None:
        return "The run was too short to say how fast the service is beside plain decoding."
    others = [
        f"{_times(one)} of {NAMED[name]}"
        for name, one in summary.uplift.items()
        if name != "over_plain" and one["low"] is not None
    ]
    beside = f", and {' and '.join(others)}" if others else ""
    return (
        f"On the same requests the service made {_times(plain)} the tokens a second of plain "
        f"decoding{beside}."
    )


def _times(one: dict[str, Any]) -> str:
    return f"{one['ratio']:.2f} times ({one['low']:.2f} to {one['high']:.2f})"


def _learning(summary: Summary) -> str:
    with_what = {"first": "the policy that ships", "counting": "nothing learned"}[summary.start]
    began = f"It began with {with_what}"
    applied = summary.policy_versions_applied
    if not applied:
        return f"{began}, tried {summary.candidates} candidates, and put none in force."
    first = next(s["at_s"] for s in summary.policy_switches if s["version"] == applied[0])
    made = "a policy" if len(applied) == 1 else f"{len(applied)} policies"
    when = f"after {first:.0f} seconds"
    return (
        f"{began}, learned from {summary.events_consumed} draft events of its own traffic, and put "
        f"{made} of its own making in force, {when if len(applied) == 1 else f'the first {when}'}."
    )


def _trust(summary: Summary) -> str:
    names = [phase["name"] for phase in summary.phases]
    plain = summary.uplift.get("over_plain", {"phases": {}})["phases"]
    phases = {n: p for n, p in plain.items() if p["pairs"]}
    slower = [n for n, p in phases.items() if p["high"] is not None and p["high"] < 1.0]
    count = max(0, len(names) - 1)
    changes = f"Through {count} announced change{'' if count == 1 else 's'} of traffic"
    if slower:
        pace = f"it was slower than plain decoding in {', '.join(slower)}"
    elif phases:
        worst = min(phases, key=lambda name: float(phases[name]["ratio"]))
        pace = f"its worst phase ({worst}) made {phases[worst]['ratio']:.2f} times plain decoding"
    else:
        pace = "it was compared with nothing"
    kept = f"{summary.events_lost or 'no'} draft event{'' if summary.events_lost == 1 else 's'}"
    failed = summary.requests_failed or "none"
    return (
        f"{changes} {pace}, {kept} {'was' if summary.events_lost == 1 else 'were'} lost, and of "
        f"{summary.requests + summary.requests_failed} requests {failed} failed."
    )
