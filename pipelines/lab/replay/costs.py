"""Step times measured on a GPU by ``hvd bench gpu``, to estimate rules' rates on it.

A recording is replayed alone. With ``batch`` requests each pays an equal share of a step in which
all requests do the same, and the router's time per request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import SettingsError
from decoder.policy.pricing import CostTable
from pipelines.replay.rules import ALONE

SHIPPED: Final = Path(__file__).with_name("h100-8b.json")


def cost_table(
    rows: Sequence[dict[str, Any]], graphs: Sequence[int] = (), share: bool = False
) -> CostTable:
    """Microseconds by step tokens, from ``rows`` of one shape and batch size at their longest
    context. With ``share`` they are one request's share, by its own tokens."""
    rows = [r for r in rows if r["context"] == max(each["context"] for each in rows)]
    batch = rows[0]["batch"]
    of = batch if share else 1
    step = {
        kind: sorted((r["tokens"], 1e3 * r["ms"] / of) for r in rows if r["step"] == kind)
        for kind in ("verify", "draft")
    }
    times = {tokens * batch // of: us for tokens, us in step["verify"]}
    times = {1: step["verify"][0][1], **times}
    drafts = dict(step["draft"])
    most, first = max(drafts, default=0), drafts.get(1, 0.0)
    more = (drafts[most] - first) / (most - 1) if most > 1 else 0.0
    return CostTable("measured", tuple(times), tuple(times.values()), max(first - more, 0.0), more,
                     graphs=tuple(graphs))  # fmt: skip


class Measured:
    """Step costs per request of one shape at one batch size, and the router's time."""

    def __init__(self, cell: dict[str, Any]) -> None:
        """Read a cell of a report.

        Raises:
            KeyError: something is missing.
        """
        self.batch, self.shape = int(cell["batch"]), str(cell["shape"])
        self.table = cost_table(cell["costs"], share=True)
        self._router_us = {m["method"]: float(m["router_exposed_us"]) for m in cell["methods"]}

    def router_us(self, rule: str) -> float:
        """Microseconds of a rule's decision for one request: as measured, else the hybrid's."""
        name = rule.partition("@")[0].partition(":")[0]
        return 0.0 if name in ALONE else self._router_us.get(name, self._router_us["hybrid"])


def measured(file: str) -> tuple[str, list[Measured]]:
    """Read ``file``: a report of ``hvd bench gpu``, or ``h100-8b``, which ships.

    Returns:
        a description of the measurement, and each shape and batch size.

    Raises:
        SettingsError: it holds no such report.
    """
    path = SHIPPED if file == SHIPPED.stem else Path(file)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        cells = [Measured(cell) for cell in report["cells"] if cell["methods"]]
        return f"{report['device']}, measured {report['date']}", cells
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SettingsError(
            f"no costs in {path} ({type(error).__name__}: {error}): give what hvd bench gpu wrote, "
            f"or {SHIPPED.stem}."
        ) from error
