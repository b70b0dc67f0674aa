"""The figures of a demo, computed from what was seen of it, and what they come to in sentences.

The names are those of ``summary.json``. No sentence claims more than the run's intervals bear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from pipelines import machine
from pipelines.watch.ledger import ARMS, Ledger, Phase
from pipelines.watch.page import (
    ALL,
    NAMES,
    as_dict,
    best_and_worst,
    by_kind,
    rate_of,
    shares_of,
    uplifts,
)

Summary = dict[str, Any]
NEEDED: Final = 120
"""Answers of the learner's phase after which a candidate had won in simulation, at most."""


def summarise(
    ledger: Ledger,
    requests: Mapping[str, int],
    began: float,
    consumed_before: int = 0,
    mistake: Mapping[str, Any] | None = None,
    lesson: Mapping[str, Any] | None = None,
) -> Summary:
    """The figures, JSON-ready. Shares are in 0..1, errors and accepted lengths in tokens, ratios of
    tokens a second with the bounds of their intervals, null where they are not known.

    Args:
        requests: how many were ``answered`` and ``failed``, and their ``tokens``.
        began: of the traffic, seconds since the epoch; ``consumed_before``: events learned by then.
        mistake: what became of a bad policy, as :func:`pipelines.demo.run.outcome`, and
            ``why``.
        lesson: what became of the learner's phase, as :func:`lesson`, and ``answers`` and ``why``.
    """
    rounds = list(ledger.rounds)
    consumed = ledger.consumed - consumed_before
    found = uplifts(rounds, ledger.phases, at_end=True)
    kinds = [name for name in found if name != ALL]
    summary: Summary = {
        "date": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        "duration_s": round(max((p.ended for p in ledger.phases), default=began) - began, 1),
        "machine": machine.description(),
        "start": ledger.named(ledger.statuses[0].policy_version if ledger.statuses else 0),
        **{f"requests_{name}": requests.get(name, 0) for name in ("answered", "failed")},
        "tokens": requests.get("tokens", 0),
        "uplift": {
            f"over_{side}": as_dict(whole)
            | {"kinds": {kind: as_dict(found[kind][side]) for kind in kinds}}
            for side, whole in found[ALL].items()
        },
        "best_and_worst": {kind: best_and_worst(found[kind]) for kind in kinds},
        "rounds": len(rounds),
        "events_produced": ledger.produced,
        "events_consumed": consumed,
        "events_lost": ledger.produced - consumed,
        "events_seen": ledger.seen,
        "policy_versions_applied": ledger.learned_versions(),
        "phases": [
            {"name": p.name, "workloads": p.workloads, "kind": p.kind}
            | {"from_s": round(p.began - began, 1), "to_s": round(p.ended - began, 1)}
            | {"events": sum(cycles[arm] for arm in ARMS), "arm_shares": shares_of(cycles)}
            | {"tok_per_s": rate_of(by_kind(rounds, [p])[p.kind])}
            for p in ledger.phases
            for cycles in [ledger.sums(p.began, p.ended)]
        ],
        "lesson": lesson,
        "mistake": mistake,
        "records_refused": ledger.refused,
        "worker": ledger.statuses[-1].model_dump(mode="json") if ledger.statuses else {},
        "learner": ledger.learner[-1].model_dump(mode="json") if ledger.learner else {},
    }
    failings, said = _failings(summary), (_speed, _choice, _learning, _guard, _trust, _open)
    sentences = [sentence for one in said if (sentence := one(summary))]
    return {"ok": not failings, "failings": failings, "sentences": sentences} | summary


def lesson(ledger: Ledger, phase: Phase) -> dict[str, Any]:
    """What the policy that most cache drafts of ``phase`` were foreseen by foresaw, and what came;
    and ``after`` it, told apart, the last of the learner's that came into force in the phase: the
    same, its ``version``, and ``after_s`` seconds of the phase. null is not yet."""
    seen = ledger.foresight(phase.began, phase.ended)
    learned, after, after_s = ledger.learned_versions(), None, None
    for at, version in ledger.policy_switches():
        if phase.began <= at < phase.ended and version in learned:
            after, after_s = version, round(at - phase.began, 1)
    others = [one for version, one in seen.items() if version != after]
    before = max(others, key=lambda one: one.drafts, default=None)
    told = {"before": before, "after": None if after is None else seen.get(after)}
    ends = {name: asdict(one) if one else None for name, one in told.items()}
    return {"phase": phase.name, **ends, "version": after, "after_s": after_s}


def _failings(summary: Summary) -> list[str]:
    """What went wrong; empty where nothing did."""
    wrong = {
        "requests failed": summary["requests_failed"],
        "events were lost between worker and learner": summary["events_lost"],
        "faults of the worker were spared the engine: see its log": summary["worker"].get("faults"),
        "records could not be read": summary["records_refused"],
        "events were made by the worker": "no" if not summary["events_produced"] else 0,
    }
    return [f"{count} {what}" for what, count in wrong.items() if count]


def _open(summary: Summary) -> str:
    """What was not shown, for want of time; no fault."""
    sides = [
        NAMES[side.removeprefix("over_")]
        for side, one in summary["uplift"].items()
        if one["low"] is None or one["low"] <= 1.0 <= one["high"]
    ]
    told = f"Whether it is faster than {', '.join(sides)} cannot be told from this run."
    return told if sides else ""


def _interval(one: Mapping[str, float]) -> str:
    return f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _speed(summary: Summary) -> str:
    known = [
        f"{_interval(one)} times those of {NAMES[side.removeprefix('over_')]}"
        for side, one in summary["uplift"].items()
        if one["low"] is not None
    ]
    if not known:
        return "The run was too short to say how fast the service is beside plain decoding."
    return f"On the same requests it made, in tokens a second, {' and '.join(known)}."


def _choice(summary: Summary) -> str:
    told = []
    for kind, ends in summary["best_and_worst"].items():
        if ends:
            (best, beside), (worst, over) = (
                (NAMES[side], _interval(summary["uplift"][f"over_{side}"]["kinds"][kind]))
                for side in ends
            )
            told.append(f"{kind}: {beside} times {best}, {over} times {worst}")
    if not told:
        return "Which fixed method is best or worst cannot be told from this run."
    return f"Beside the best and the worst fixed method of each traffic it made, {'; '.join(told)}."


def _guard(summary: Summary) -> str:
    found = summary["mistake"]
    if found is None:
        return "No bad policy was promoted: there was no time, or no champion yet."
    named = f"Version {found['version']}, which drafts nothing, was made champion by hand"
    if not found["in_force"]:
        return f"{named}; no worker took it in the time there was."
    floor, back = found["relieved_s"], found["taken_back_s"]
    told = []
    if floor is not None:
        told.append(f"the worker's floor decided in its place after {floor:.0f} seconds")
    if back is not None:
        told.append(f"another policy was in force after {back:.0f} seconds{_why(found)}")
    return f"{named}; {' and '.join(told) or 'nothing took it back in the time there was'}."


def _learning(summary: Summary) -> str:
    applied, found = summary["policy_versions_applied"], summary["lesson"]
    told = (
        f"It began with {summary['start']}, learned from {summary['events_consumed']} "
        f"draft events of its own traffic, and put {len(applied)} of the policies it made in force"
    )
    if found is None or found["before"] is None:
        return f"{told}."
    told += f"; in {found['phase']}, where every copy breaks off early, {_seen(found['before'])}"
    if found["after"] is None:
        return (
            f"{told}, and whether a new policy of the learner's is better there cannot be told "
            f"yet, after {found['answers']} answers; in simulation it took up to {NEEDED}."
        )
    return (
        f"{told}; version {found['version']}, which the learner made, was in force there after "
        f"{found['after_s']:.0f} seconds{_why(found)}, and then {_seen(found['after'])}."
    )


def _why(found: Mapping[str, Any]) -> str:
    """The reason that the registry gives, if it gives one."""
    return f" ({found['why']})" if found.get("why") else ""


def _seen(one: Mapping[str, float]) -> str:
    """What a policy foresaw and what came."""
    return (
        f"{one['foreseen']:.2f} accepted tokens of a draft were foreseen and {one['accepted']:.2f} "
        f"came, off by {one['off']:.2f} each"
    )


def _trust(summary: Summary) -> str:
    plain = summary["uplift"].get("over_plain", {"kinds": {}})["kinds"]
    slower = [kind for kind, one in plain.items() if one["high"] is not None and one["high"] < 1.0]
    pace = f"it was slower than plain decoding in {', '.join(slower)}; " if slower else ""
    lost, failed = summary["events_lost"] or "none", summary["requests_failed"]
    return (
        f"Through {max(0, len(summary['phases']) - 1)} announced changes of traffic {pace}"
        f"{lost} of {summary['events_produced']} draft events were lost, "
        f"and {failed or 'none'} of {summary['requests_answered'] + failed} requests failed."
    )
