"""Two policies on recorded generations: where they decide otherwise, and what it brought.

Each decodes every recording by itself, as ``hvd replay`` does; they are compared cycle by cycle
where both stood at the same place of the same recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.core.payoff.token_classes import token_classes_of
from decoder.policy.rule import ARMS
from decoder.settings import WorkerSettings
from pipelines.lab.replay.cycles import NOTHING, Cycles
from pipelines.lab.replay.engine import Simulator, hybrid
from pipelines.lab.replay.traces import read
from pipelines.progress import Step


def compare(
    policies: tuple[Policy, Policy],
    paths: Sequence[Path],
    tokenizer: Any,
    limit: int,
    model_accepts: float,
    step: Step,
) -> list[dict[str, Any]]:
    """What both make of ``limit`` generations of each of ``paths``, and of all, which come first.

    Returns:
        plain records with rates in tokens by the time of a plain step, at nominal costs; a row of
        ``otherwise`` is of cycles at which the one took arm ``one`` and the other arm ``other``,
        with the mean of draft tokens that were accepted of each.

    Raises:
        TraceError: there is nothing to compare on.
    """
    simulator = Simulator(token_classes_of(tokenizer), WorkerSettings.load(), model_accepts)
    decoded = {}
    for path in paths:
        if traces := read(path, tokenizer).traces[:limit]:
            pair = []
            for at, policy in enumerate(policies):
                step(f"{path.stem}, {('one', 'other')[at]}", at, 2)
                pair.append(simulator.decode(traces, hybrid("policy", policy))[0])
            decoded[path.stem] = pair
    if not decoded:
        raise TraceError("nothing to compare on: name recordings with --traces")
    found = [_compared(name, [pair]) for name, pair in decoded.items()]
    return [_compared("all", list(decoded.values())), *found] if len(found) > 1 else found


def _compared(name: str, pairs: Sequence[Sequence[Cycles]]) -> dict[str, Any]:
    both = [sum((c.tally() for c in side), NOTHING) for side in zip(*pairs, strict=True)]
    places = ["trace", "position"]
    rows = pd.concat(
        _frame(one).merge(_frame(other), on=places, suffixes=("_one", "_other"))
        for one, other in pairs
    )
    apart = rows[(rows.arm_one != rows.arm_other) | (rows.verified_one != rows.verified_other)]
    otherwise = [
        {
            "one": ARMS[a],
            "other": ARMS[b] if a != b else f"{ARMS[b]}, another length",
            "cycles": len(here),
            "accepted_one": float(here.accepted_one.mean()),
            "accepted_other": float(here.accepted_other.mean()),
        }
        for (a, b), here in apart.groupby(["arm_one", "arm_other"])
    ]
    return {
        "name": name,
        "rates": [tally.rate for tally in both],
        "ratio": both[1].rate / both[0].rate if both[0].rate else 1.0,
        "cycles": [tally.cycles for tally in both],
        "cycles_by_arm": [dict(zip(ARMS, tally.by_arm, strict=True)) for tally in both],
        "cycles_at_the_same_place": len(rows),
        "otherwise": sorted(otherwise, key=lambda row: -row["cycles"]),
    }


def _frame(cycles: Cycles) -> pd.DataFrame:
    columns = ("trace", "position", "arm", "verified", "accepted")
    return pd.DataFrame({name: getattr(cycles, name) for name in columns})


def tables(found: Sequence[dict[str, Any]], one: str, other: str) -> tuple[Table, Table]:
    """Rates, a row a file; and where the two decide otherwise, most cycles first."""
    rates = Table(
        "recordings", caption="rate: tokens in the time of a plain step, at nominal costs"
    )
    for heading in (f"rate, {one}", f"rate, {other}", "ratio", "decided otherwise"):
        rates.add_column(heading, justify="right")
    for c in found:
        share = sum(row["cycles"] for row in c["otherwise"]) / max(1, c["cycles_at_the_same_place"])
        figures = (f"{rate:.3f}" for rate in (*c["rates"], c["ratio"]))
        rates.add_row(c["name"], *figures, f"{share:.1%}")
    compared = found[0]["cycles_at_the_same_place"]
    apart = Table(one, other, caption=f"accepted draft tokens a cycle; {compared} cycles compared")
    for heading in ("cycles", f"accepted, {one}", f"accepted, {other}"):
        apart.add_column(heading, justify="right")
    for row in found[0]["otherwise"]:
        accepted = (f"{row[f'accepted_{side}']:.2f}" for side in ("one", "other"))
        apart.add_row(row["one"], row["other"], str(row["cycles"]), *accepted)
    return rates, apart
