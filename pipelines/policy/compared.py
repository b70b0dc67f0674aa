"""Two policies on recorded generations: where they decide otherwise, and what it brought.

Each decodes every recording by itself, as ``hvd replay`` does; they are compared cycle by cycle
where both stood at the same place of the same recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from decoder.policy.rule import ARMS
from decoder.settings import WorkerSettings
from pipelines.progress import Step
from pipelines.replay import own
from pipelines.replay.cycles import NOTHING, Cycles, Tally
from pipelines.replay.engine import Simulator, hybrid
from pipelines.replay.traces import Trace, read

LIMIT: Final = 20
"""Generations of each file, unless more are asked for: some seconds a file."""


@dataclass(frozen=True)
class Otherwise:
    """Cycles at which one policy took arm ``one`` and the other arm ``other``, and the draft tokens
    that were accepted of each, in the mean."""

    one: str
    other: str
    cycles: int
    accepted_one: float
    accepted_other: float


@dataclass(frozen=True)
class Compared:
    """What two policies made of the recordings of a file."""

    name: str
    one: Tally
    other: Tally
    shared: int  # cycles at the same place
    otherwise: list[Otherwise]

    @property
    def ratio(self) -> float:
        """Rate of the other over the one's; steps at nominal costs."""
        return self.other.rate / self.one.rate if self.one.rate else 1.0


def recordings(asked: Path | None) -> list[Path]:
    """Trace files: ``asked``, those in it, or the project's own.

    Raises:
        TraceError: there are none.
    """
    folder = own.folder() if asked is None else asked
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.jsonl"))
    if not paths:
        raise TraceError(
            f"no recordings (*.jsonl) in {folder}: name others with --traces"
            + (", or make some with 'hvd drift --record 20'" if asked is None else "")
        )
    return paths


def compare(
    one: Policy,
    other: Policy,
    paths: Sequence[Path],
    tokenizer: Any,
    token_classes: FloatArray,
    limit: int,
    model_accepts: float,
    step: Step,
) -> list[Compared]:
    """Compare on each of ``paths``, and on all together, which comes first.

    Raises:
        TraceError: there is nothing to compare on.
    """
    found, cycles = [], []
    for path in paths:
        traces = read(path, tokenizer).traces[:limit]
        if not traces:
            continue
        pair = tuple(
            _decode(policy, traces, token_classes, model_accepts, f"{path.stem}, {name}", step)
            for name, policy in (("one", one), ("other", other))
        )
        found.append(_compared(path.stem, [(pair[0], pair[1])]))
        cycles.append((pair[0], pair[1]))
    if not found:
        raise TraceError("nothing to compare on: name recordings with --traces")
    return [_compared("all", cycles), *found] if len(found) > 1 else found


def as_dict(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """The figures, plain."""
    return [
        {
            "name": c.name,
            "rates": [c.one.rate, c.other.rate],
            "ratio": c.ratio,
            "cycles": [c.one.cycles, c.other.cycles],
            "cycles_by_arm": [
                dict(zip(ARMS, tally.by_arm, strict=True)) for tally in (c.one, c.other)
            ],
            "cycles_at_the_same_place": c.shared,
            "otherwise": [vars(o) for o in c.otherwise],
        }
        for c in compared
    ]


def rates_table(compared: Sequence[Compared], one: str, other: str) -> Table:
    """Rates, a row a file."""
    table = Table(caption="rate: tokens in the time of a plain step, at nominal costs")
    table.add_column("recordings", overflow="fold")
    for heading in (f"rate, {one}", f"rate, {other}", "ratio", "decided otherwise"):
        table.add_column(heading, justify="right")
    for c in compared:
        share = sum(o.cycles for o in c.otherwise) / max(1, c.shared)
        table.add_row(
            c.name, f"{c.one.rate:.3f}", f"{c.other.rate:.3f}", f"{c.ratio:.3f}", f"{share:.1%}"
        )
    return table


def otherwise_table(compared: Compared, one: str, other: str) -> Table:
    """Where they decide otherwise, most cycles first."""
    table = Table(caption=f"accepted draft tokens a cycle; {compared.shared} cycles compared")
    for heading in (one, other):
        table.add_column(heading)
    for heading in ("cycles", f"accepted, {one}", f"accepted, {other}"):
        table.add_column(heading, justify="right")
    for o in compared.otherwise:
        accepted = f"{o.accepted_one:.2f}", f"{o.accepted_other:.2f}"
        table.add_row(o.one, o.other, str(o.cycles), *accepted)
    return table


def _decode(
    policy: Policy, traces: Sequence[Trace], classes: FloatArray, accepts: float, what: str,
    step: Step,
) -> Cycles:  # fmt: skip
    simulator = Simulator(classes, WorkerSettings.load(), accepts)
    by = hybrid("policy", policy)
    return simulator.decode(traces, by, told=partial(step, what))[0]


def _compared(name: str, pairs: Sequence[tuple[Cycles, Cycles]]) -> Compared:
    one = sum((pair[0].tally() for pair in pairs), NOTHING)
    other = sum((pair[1].tally() for pair in pairs), NOTHING)
    # columns: arm of the one, arm of the other, draft length is another, accepted by each
    rows = np.concatenate([_side_by_side(*pair) for pair in pairs])
    apart = (rows[:, 0] != rows[:, 1]) | (rows[:, 2] != rows[:, 3])
    found = []
    for a, b in np.unique(rows[apart, :2], axis=0).tolist():
        here = rows[apart & (rows[:, 0] == a) & (rows[:, 1] == b)]
        accepted = here[:, 4:].mean(axis=0).tolist()
        names = (ARMS[a], ARMS[b]) if a != b else (ARMS[a], f"{ARMS[b]}, another length")
        found.append(Otherwise(*names, len(here), *accepted))
    found.sort(key=lambda o: -o.cycles)
    return Compared(name, one, other, len(rows), found)


def _side_by_side(one: Cycles, other: Cycles) -> Any:
    """Arms, verified and accepted draft tokens of both, int64 [n, 6], where both stood."""
    places = [np.stack([c.trace, c.position]).astype(np.int64) for c in (one, other)]
    keys, others = ((place[0] << 32) + place[1] for place in places)
    _, mine, theirs = np.intersect1d(keys, others, assume_unique=True, return_indices=True)
    columns = [
        column.astype(np.int64)[index]
        for name in ("arm", "verified", "accepted")
        for column, index in ((getattr(one, name), mine), (getattr(other, name), theirs))
    ]
    return np.stack(columns, axis=1)
