"""The figures of a demo, under their names in ``summary.json``, and sentences about them. No
sentence claims more than the run's intervals support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
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
NEEDED: Final = 120  # most answers of the learner's phase that a candidate needed in simulation


@dataclass(frozen=True)
class Run:
    """What a demo did, beside what its ledger recorded."""

    requests: Mapping[str, int]  # counts: answered, failed, tokens
    began: float  # start of the traffic, seconds since the epoch
    consumed_before: int = 0  # events that the learner had read by then
    mistake: Mapping[str, Any] | None = None  # see run.outcome; and why
    lesson: Mapping[str, Any] | None = None  # see lesson; and answers, why
    step_s: float = 0.0  # a plain step of one request
    left_out: Sequence[str] = ()  # phases without time


def summarise(ledger: Ledger, run: Run, virtual: Mapping[str, Any] | None = None) -> Summary:
    """The figures, JSON-ready. Shares are in 0..1, errors and accepted lengths in tokens, and
    ratios of tokens a second have the bounds of their intervals. null: not known.

    Args:
        virtual: what every rule made of the answers, see :func:`pipelines.demo.replay.replayed`.
    """
    requests, began = run.requests, run.began
    rounds, consumed = list(ledger.rounds), ledger.consumed - run.consumed_before
    gains = uplifts(rounds, ledger.phases, at_end=True)
    kinds = [name for name in gains if name != ALL]
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
            | {"kinds": {kind: as_dict(gains[kind][side]) for kind in kinds}}
            for side, whole in gains[ALL].items()
        },
        "best_and_worst": {kind: best_and_worst(gains[kind]) for kind in kinds},
        "rounds": len(rounds),
        "events_produced": ledger.produced,
        "events_consumed": consumed,
        "events_lost": ledger.produced - consumed,
        "events_seen": ledger.seen,
        "policy_versions_applied": ledger.learned_versions(),
        "phases": [_phase(ledger, p, began) for p in ledger.phases],
        "phases_left_out": [*run.left_out],
        "plain_step_ms": round(1e3 * run.step_s, 1),
        "virtual": dict(virtual or {}),
        "lesson": run.lesson,
        "mistake": run.mistake,
        "records_refused": ledger.refused,
        "worker": ledger.statuses[-1].model_dump(mode="json") if ledger.statuses else {},
        "learner": ledger.learner[-1].model_dump(mode="json") if ledger.learner else {},
    }
    failings = _failings(summary)
    writers = _speed, _choice, _rules, _learning, _guard, _trust, _open
    sentences = [sentence for write in writers if (sentence := write(summary))]
    return {"ok": not failings, "failings": failings, "sentences": sentences} | summary


def _phase(ledger: Ledger, phase: Phase, began: float) -> dict[str, Any]:
    cycles = ledger.sums(phase.began, phase.ended)
    return {
        "name": phase.name,
        "workloads": phase.workloads,
        "kind": phase.kind,
        "from_s": round(phase.began - began, 1),
        "to_s": round(phase.ended - began, 1),
        "events": sum(cycles[arm] for arm in ARMS),
        "arm_shares": shares_of(cycles),
        "tok_per_s": rate_of(by_kind(list(ledger.rounds), [phase])[phase.kind]),
    }


def lesson(ledger: Ledger, phase: Phase) -> dict[str, Any]:
    """The calibration in ``phase`` of the policy that decided most of its drafts, and ``after`` it
    that of the learner's last policy loaded in the phase, with its ``version`` and the second
    ``after_s`` of the phase. null: not yet."""
    seen = ledger.calibration(phase.began, phase.ended)
    learned, after, after_s = ledger.learned_versions(), None, None
    for at, version in ledger.policy_switches():
        if phase.began <= at < phase.ended and version in learned:
            after, after_s = version, round(at - phase.began, 1)
    others = [one for version, one in seen.items() if version != after]
    before = max(others, key=lambda one: one.drafts, default=None)
    pair = {"before": before, "after": None if after is None else seen.get(after)}
    keys = "drafts", "foreseen", "accepted", "off"
    ends = {
        name: dict(zip(keys, astuple(one), strict=True)) if one else None
        for name, one in pair.items()
    }
    return {"phase": phase.name, **ends, "version": after, "after_s": after_s}


def _failings(summary: Summary) -> list[str]:
    """What failed; empty if nothing did."""
    wrong = {
        "requests failed": summary["requests_failed"],
        "events were lost between worker and learner": summary["events_lost"],
        "faults of the worker were handled: see its log": summary["worker"].get("faults"),
        "records could not be read": summary["records_refused"],
        "events were made by the worker": "no" if not summary["events_produced"] else 0,
    }
    return [f"{count} {what}" for what, count in wrong.items() if count]


def _open(summary: Summary) -> str:
    """What the run had no time to show; not a failure."""
    sentences = []
    if left_out := summary["phases_left_out"]:
        sentences.append(f"This machine had no time for these phases: {', '.join(left_out)}.")
    live = {side.removeprefix("over_"): one for side, one in summary["uplift"].items()}
    unknown = [s for s, one in live.items() if not (is_told(one) or is_told(one["at_costs"]))]
    sides = [NAMES[side] for side in unknown if not _virtually_told(summary, side)]
    if sides:
        what = f"faster than {', '.join(sides)}"
        sentences.append(f"Whether it is {what} cannot be told from this run.")
    return " ".join(sentences)


LEVEL: Final = 0.05  # rates are equal if the whole interval of their ratio lies within this of 1


def is_level(one: Mapping[str, Any]) -> bool:
    """Whether both are equally fast."""
    return one["low"] is not None and one["low"] >= 1.0 - LEVEL and one["high"] <= 1.0 + LEVEL


def is_told(one: Mapping[str, Any]) -> bool:
    """Whether the interval of a ratio says which is faster, or that they are equal."""
    return one["low"] is not None and (not one["low"] <= 1.0 <= one["high"] or is_level(one))


def _virtually_told(summary: Summary, side: str) -> bool:
    """Whether virtual time says which is faster, for every kind of traffic."""
    kinds = [kind["over"] for kind in summary["virtual"].get("kinds", {}).values()]
    rules = {PLAIN: "greedy", SUFFIX: "suffix", MODEL: "eagle3"}
    ratios = [
        one
        for over in kinds
        for rule, one in over.items()
        if rule.partition(":")[0] == rules.get(side)
    ]
    return bool(ratios) and all(map(is_told, ratios))


def _interval(one: Mapping[str, float]) -> str:
    return f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _beside(one: Mapping[str, float], name: str) -> str:
    """A ratio in words."""
    if is_level(one):
        return f"as fast as {name}, {_interval(one)}"
    return f"{_interval(one)} times as fast as {name}"


def _speed(summary: Summary) -> str:
    live = {NAMES[side.removeprefix("over_")]: one for side, one in summary["uplift"].items()}
    wall = [_beside(one, name) for name, one in live.items() if is_told(one)]
    priced = [
        _beside(one["at_costs"], name)
        for name, one in live.items()
        if not is_told(one) and is_told(one["at_costs"])
    ]
    known = [_beside(one, name) for name, one in live.items() if one["low"] is not None]
    if not (wall or priced or known):
        return "The run was too short to compare the service with plain decoding."
    parts = [" and ".join(wall or known * (not priced))] * bool(wall or not priced)
    if priced:
        timed = "with each step at the measured time for its size, which excludes stalls"
        parts.append(f"{' and '.join(priced)} {timed}")
    return f"Live, on the same requests, it was {'; '.join(parts)}."


def _choice(summary: Summary) -> str:
    parts = []
    virtual = summary["virtual"].get("kinds", {})
    for kind, ends in summary["best_and_worst"].items():
        ratios = [summary["uplift"][f"over_{side}"]["kinds"][kind] for side in ends or ()]
        if ends and (not virtual or (kind in virtual and all(map(is_told, ratios)))):
            (best, beside), (worst, over) = (
                (NAMES[s], _interval(o)) for s, o in zip(ends, ratios, strict=True)
            )
            parts.append(f"{kind}: {beside} times {best}, {over} times {worst}")
    if not parts:
        unknown = "Which fixed method is best or worst cannot be told from this run."
        return "" if virtual else unknown
    return f"Live, its rate over the best and the worst fixed method was {'; '.join(parts)}."


def ends_of(over: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """The best and the worst rule."""
    by = sorted(over, key=lambda rule: over[rule]["ratio"])
    return by[0], by[-1]


def _rules(summary: Summary) -> str:
    """What every rule made of the same answers in virtual time."""
    parts = []
    for kind, figures in summary["virtual"].get("kinds", {}).items():
        over = figures["over"]
        best, worst = ends_of(over)
        ends = f"{_beside(over[best], name_of(best))}, the best of {len(over)} rules"
        if not is_told(over[best]):
            ends += ", a difference that is not significant"
        parts.append(f"{kind}: {ends}, and {_beside(over[worst], name_of(worst))}, the worst")
    if not parts:
        return ""
    return (
        "Every rule decoded this run's answers again in virtual time, at the measured step times "
        "and with model acceptance drawn from the measured curve. There the service is, "
        f"{'; '.join(parts)}."
    )


def rule_tiles(summary: Summary) -> list[dict[str, str]]:
    """Tiles: the ratio to the best rule for each kind of traffic, in virtual time."""
    tiles = []
    for kind, figures in summary["virtual"].get("kinds", {}).items():
        best = ends_of(figures["over"])[0]
        detail = f"{_interval(figures['over'][best])}, {name_of(best)}"
        label = f"{kind}, in virtual time, over the best of {len(figures['over'])} rules"
        value = f"{figures['over'][best]['ratio']:.2f}"
        tiles.append({"id": f"rules_{kind}", "label": label, "value": value, "detail": detail})
    return tiles


def rule_tables(summary: Summary) -> list[dict[str, Any]]:
    """A table of every rule in virtual time; none without figures."""
    kinds = summary["virtual"].get("kinds", {})
    if not kinds:
        return []
    rules = dict.fromkeys(rule for figures in kinds.values() for rule in figures["over"])
    rows = [
        [name_of(rule), *(_interval(figures["over"][rule]) for figures in kinds.values())]
        for rule in rules
    ]
    counts = [f"{kind}, {figures['answers']} answers" for kind, figures in kinds.items()]
    title = (
        "Virtual time: ratio of tokens a second to each rule, on this run's answers at the "
        "measured step times, with model acceptance drawn from the measured curve"
    )
    return [{"title": title, "head": ["over", *counts], "rows": rows}]


def _guard(summary: Summary) -> str:
    mistake = summary["mistake"]
    if mistake is None:
        return "No bad policy was promoted: there was no time, or no champion yet."
    named = f"Version {mistake['version']}, which drafts nothing, was made champion by hand"
    if not mistake["in_force"]:
        return f"{named}; no worker loaded it in the time there was."
    floor, back = mistake["relieved_s"], mistake["taken_back_s"]
    parts = []
    if floor is not None:
        parts.append(f"the worker fell back to a fixed arm after {floor:.0f} seconds")
    if back is not None:
        parts.append(f"another policy served after {back:.0f} seconds{_why(mistake)}")
    return f"{named}; {' and '.join(parts) or 'nothing replaced it in the time there was'}."


def _learning(summary: Summary) -> str:
    applied, lesson = summary["policy_versions_applied"], summary["lesson"]
    text = (
        f"It began with {summary['start']}, learned from {summary['events_consumed']} "
        f"draft events of its own traffic, and served {len(applied)} of the policies it trained"
    )
    if lesson is None or lesson["before"] is None:
        return f"{text}."
    text += f"; in {lesson['phase']}, where every copy ends early, {_seen(lesson['before'])}"
    if lesson["after"] is None:
        return (
            f"{text}. Whether the learner's next policy is better there cannot be told yet, after "
            f"{lesson['answers']} answers; in simulation it took up to {NEEDED}."
        )
    return (
        f"{text}. The learner's version {lesson['version']} served there after "
        f"{lesson['after_s']:.0f} seconds{_why(lesson)}, and then {_seen(lesson['after'])}."
    )


def _why(outcome: Mapping[str, Any]) -> str:
    """The registry's reason, in brackets, if there is one."""
    return f" ({outcome['why']})" if outcome.get("why") else ""


def _seen(one: Mapping[str, float]) -> str:
    """Predicted and accepted tokens in words."""
    return (
        f"it predicted {one['foreseen']:.2f} accepted tokens a draft and {one['accepted']:.2f} "
        f"were accepted, with a mean error of {one['off']:.2f}"
    )


def _trust(summary: Summary) -> str:
    plain = summary["uplift"].get("over_plain", {"kinds": {}})["kinds"]
    slower = [kind for kind, one in plain.items() if one["high"] is not None and one["high"] < 1.0]
    pace = f"it was slower than plain decoding in {', '.join(slower)}; " if slower else ""
    lost, failed = summary["events_lost"] or "none", summary["requests_failed"]
    return (
        f"Over {max(0, len(summary['phases']) - 1)} changes of traffic {pace}"
        f"{lost} of {summary['events_produced']} draft events were lost, "
        f"and {failed or 'none'} of {summary['requests_answered'] + failed} requests failed."
    )
