"""The figures of a demo, computed from what was seen of it, and what they come to in sentences.

The names are those of ``summary.json``. No sentence claims more than the run's intervals bear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from decoder.contracts.bundle import CHAMPION
from decoder.contracts.trials import MODEL, PLAIN, SUFFIX
from learner.evaluation.effect import COST, effect_of
from pipelines import machine
from pipelines.replay.rules import name_of
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


@dataclass(frozen=True)
class Run:
    """What a demo did beside what its ledger saw."""

    requests: Mapping[str, int]  # how many were answered and failed, and their tokens
    began: float  # of the traffic, seconds since the epoch
    consumed_before: int = 0  # events that the learner had by then
    mistake: Mapping[str, Any] | None = None  # as of run.outcome, and why
    lesson: Mapping[str, Any] | None = None  # as of lesson, and answers and why
    step_s: float = 0.0  # of a plain step of one request, before the traffic
    left_out: Sequence[str] = ()  # phases that there was no time for


def summarise(ledger: Ledger, run: Run, virtual: Mapping[str, Any] | None = None) -> Summary:
    """The figures, JSON-ready. Shares are in 0..1, errors and accepted lengths in tokens, ratios of
    tokens a second with the bounds of their intervals, null where they are not known.

    Args:
        virtual: what every rule makes of the answers, as :func:`pipelines.demo.replay.replayed`.
    """
    requests, began = run.requests, run.began
    rounds = list(ledger.rounds)
    consumed = ledger.consumed - run.consumed_before
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
            | {"at_costs": as_dict(effect_of(rounds, CHAMPION, side, True, COST))}
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
        "phases_left_out": [*run.left_out],
        "plain_step_ms": round(1e3 * run.step_s, 1),
        "virtual": dict(virtual or {}),
        "lesson": run.lesson,
        "mistake": run.mistake,
        "records_refused": ledger.refused,
        "worker": ledger.statuses[-1].model_dump(mode="json") if ledger.statuses else {},
        "learner": ledger.learner[-1].model_dump(mode="json") if ledger.learner else {},
    }
    failings, said = _failings(summary), (_speed, _choice, _rules, _learning, _guard, _trust, _open)
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
    told = []
    if left_out := summary["phases_left_out"]:
        told.append(f"This machine had no time for these phases: {', '.join(left_out)}.")
    live = {side.removeprefix("over_"): one for side, one in summary["uplift"].items()}
    untold = [s for s, one in live.items() if not (is_told(one) or is_told(one["at_costs"]))]
    sides = [NAMES[side] for side in untold if not _virtually_told(summary, side)]
    if sides:
        what = f"faster than {', '.join(sides)}"
        told.append(f"Whether it is {what} cannot be told from this run.")
    return " ".join(told)


LEVEL: Final = 0.05
"""Rates whose ratio lies within this of 1, with its whole interval, are as fast as each other."""


def is_level(one: Mapping[str, Any]) -> bool:
    """Whether both are as fast as each other."""
    return one["low"] is not None and one["low"] >= 1.0 - LEVEL and one["high"] <= 1.0 + LEVEL


def is_told(one: Mapping[str, Any]) -> bool:
    """Whether the interval of a ratio says who is faster, or that nobody is."""
    return one["low"] is not None and (not one["low"] <= 1.0 <= one["high"] or is_level(one))


def _virtually_told(summary: Summary, side: str) -> bool:
    """Whether the answers in virtual time tell who is faster, on every kind of traffic."""
    kinds = [kind["over"] for kind in summary["virtual"].get("kinds", {}).values()]
    rules = {PLAIN: "greedy", SUFFIX: "suffix", MODEL: "eagle3"}
    found = [
        one
        for over in kinds
        for rule, one in over.items()
        if rule.partition(":")[0] == rules.get(side)
    ]
    return bool(found) and all(map(is_told, found))


def _interval(one: Mapping[str, float]) -> str:
    return f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _beside(one: Mapping[str, float], name: str) -> str:
    """A ratio in words."""
    if is_level(one):
        return f"as fast as {name}, {_interval(one)}"
    return f"{_interval(one)} times as fast as {name}"


def _speed(summary: Summary) -> str:
    live = {NAMES[side.removeprefix("over_")]: one for side, one in summary["uplift"].items()}
    told = [_beside(one, name) for name, one in live.items() if is_told(one)]
    priced = [
        _beside(one["at_costs"], name)
        for name, one in live.items()
        if not is_told(one) and is_told(one["at_costs"])
    ]
    known = [_beside(one, name) for name, one in live.items() if one["low"] is not None]
    if not (told or priced or known):
        return "The run was too short to say how fast the service is beside plain decoding."
    said = [" and ".join(told or known * (not priced))] * bool(told or not priced)
    if priced:
        timed = "with each step at the worker's measured time for its size, which leaves out stalls"
        said.append(f"{' and '.join(priced)} {timed} of the machine")
    return f"Live, on the same requests, it was {'; '.join(said)}."


def _choice(summary: Summary) -> str:
    told = []
    virtual = summary["virtual"].get("kinds", {})
    for kind, ends in summary["best_and_worst"].items():
        found = [summary["uplift"][f"over_{side}"]["kinds"][kind] for side in ends or ()]
        if ends and (not virtual or (kind in virtual and all(map(is_told, found)))):
            (best, beside), (worst, over) = (
                (NAMES[s], _interval(o)) for s, o in zip(ends, found, strict=True)
            )
            told.append(f"{kind}: {beside} times {best}, {over} times {worst}")
    if not told:
        unknown = "Which fixed method is best or worst cannot be told from this run."
        return "" if virtual else unknown
    beside_both = "Live, beside the best and the worst fixed method of each traffic, it made"
    return f"{beside_both} {'; '.join(told)}."


def ends_of(over: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """Of the rules that answers were decoded by, the best and the worst."""
    by = sorted(over, key=lambda rule: over[rule]["ratio"])
    return by[0], by[-1]


def _rules(summary: Summary) -> str:
    """What every rule made of the same answers, in virtual time."""
    told = []
    for kind, found in summary["virtual"].get("kinds", {}).items():
        over = found["over"]
        best, worst = ends_of(over)
        ends = f"{_beside(over[best], name_of(best))}, the best of {len(over)} rules"
        if not is_told(over[best]):
            ends += ", from which it cannot be told apart"
        told.append(f"{kind}: {ends}, and {_beside(over[worst], name_of(worst))}, the worst")
    if not told:
        return ""
    return (
        "Every rule decoded this run's own answers once more in virtual time (each step takes what "
        "the worker measured; what a model draft has accepted is drawn from the measured curve). "
        f"There it is, {'; '.join(told)}."
    )


def rule_tiles(summary: Summary) -> list[dict[str, str]]:
    """The ratio over the best rule of each kind of traffic, in virtual time, as tiles."""
    tiles = []
    for kind, found in summary["virtual"].get("kinds", {}).items():
        best = ends_of(found["over"])[0]
        detail = f"{_interval(found['over'][best])}, {name_of(best)}"
        label = f"{kind}, in virtual time, over the best of {len(found['over'])} rules"
        value = f"{found['over'][best]['ratio']:.2f}"
        tiles.append({"id": f"rules_{kind}", "label": label, "value": value, "detail": detail})
    return tiles


def rule_tables(summary: Summary) -> list[dict[str, Any]]:
    """What every rule made of the same answers, as a table of the page; none where none was."""
    kinds = summary["virtual"].get("kinds", {})
    if not kinds:
        return []
    rules = dict.fromkeys(rule for found in kinds.values() for rule in found["over"])
    rows = [
        [name_of(rule), *(_interval(found["over"][rule]) for found in kinds.values())]
        for rule in rules
    ]
    counts = [f"{kind}, {found['answers']} answers" for kind, found in kinds.items()]
    title = (
        "In virtual time: tokens a second over those of each rule, on this run's own answers, at "
        "the step times that the worker measured; model drafts are drawn from their measured "
        "acceptance"
    )
    return [{"title": title, "head": ["over", *counts], "rows": rows}]


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
