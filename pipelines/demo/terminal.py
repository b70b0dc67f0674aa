"""What a demo says in a terminal: a line while it runs, tables and sentences at its end."""

from __future__ import annotations

import time
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipelines.watch.drafts import ARMS
from pipelines.watch.ledger import Ledger
from pipelines.watch.uplift import ALL, NAMES, as_text, uplifts

WINDOW_SECONDS: Final = 30.0


def status_line(ledger: Ledger) -> str:
    """The state of a run in one line of text."""
    now = time.time()
    (window,) = ledger.drafts.windows([(now - WINDOW_SECONDS, now)])
    phase = ledger.phases[-1].name if ledger.phases else "starting"
    over = uplifts(list(ledger.rounds), ())
    worth = ", ".join(f"over {NAMES[side]} {as_text(one[ALL])}" for side, one in over.items())
    shares = " ".join(f"{arm} {window.arm_shares[arm]:.0%}" for arm in ARMS)
    policy = f"v{ledger.statuses[-1].policy_version}" if ledger.statuses else "-"
    candidates = ledger.learner[-1].candidates if ledger.learner else 0
    return (
        f"{phase}: {worth}, arms {shares}, policy {policy}, events {ledger.produced} made "
        f"{ledger.consumed} learned from, candidates {candidates}"
    )


def outcome(summary: dict[str, Any], page: dict[str, Any]) -> RenderableType:
    """A finished run: the page's tables of phases, sentences, and what could not be told."""
    parts: list[RenderableType] = []
    for shown in (t for t in page["tables"] if t["title"].startswith("Phases")):
        table = Table(*shown["head"], title=shown["title"], box=None, padding=(0, 1, 0, 0))
        for row in shown["rows"]:
            table.add_row(*row)
        parts += [table, Text()]
    return Group(*parts, *map(Text, (*summary["sentences"], *summary["notes"])))
