"""The figures of a run in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rich.box import SIMPLE
from rich.table import Table

Record = dict[str, Any]


def number(value: float | None, digits: int = 2) -> str:
    """``value`` for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share for a table."""
    return "-" if value is None else f"{value:.{digits}%}"


def spread(record: Record, name: str) -> str:
    """A figure with its 95% interval where there is one."""
    interval = record.get(f"{name}_interval")
    text = number(record[name])
    return text if interval is None else f"{text} ({interval[0]:.2f}-{interval[1]:.2f})"


Cell = Callable[[Record], str]

COLUMNS: Final[dict[str, Cell]] = {
    "method": lambda r: str(r["method"]),
    "tok/s": lambda r: number(r["tok_per_s"], 1),
    "xgreedy": lambda r: number(r["speedup_vs_greedy"]),
    "cyc/1K": lambda r: number(r["cycles_per_1k"], 0),
    "ms/cyc": lambda r: number(r["ms_per_cycle"], 1),
    "acc": lambda r: number(r["mean_accepted"]),
    "cache": lambda r: percent(r["cache_share"]),
    "model": lambda r: percent(r["model_share"]),
    "oracle": lambda r: percent(r["fraction_of_oracle"]),
    "P@6": lambda r: percent(r["precision_at_6"]),
    "R@6": lambda r: percent(r["recall_at_6"]),
    "loops": lambda r: percent(r["loop_share"]),
    "same": lambda r: {True: "yes", False: "NO", None: "-"}[r["exact"]],
}


def shown(summary: dict[str, Any]) -> list[Table]:
    """All prompts together for each template, loops apart, then speedups by dataset."""
    tables = []
    for template in summary["settings"]["templates"]:
        rows = [r for r in summary["overall"] if r["template"] == template]
        note = "" if template == "chat" else f", template {template}"
        prompts = rows[0]["prompts"] if rows else 0
        tables.append(_whole(rows, f"all {prompts} prompts{note}"))
        tables.append(_apart(rows, f"outputs that loop, apart{note}"))
        records = [r for r in summary["records"] if r["template"] == template]
        tables.append(_speedups(records, summary["settings"]["methods"], f"x greedy{note}"))
    return tables


def _narrow(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE, padding=(0, 0), pad_edge=False,
        show_edge=False,
    )  # fmt: skip


def _whole(rows: list[Record], title: str) -> Table:
    table = _narrow(title)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row) for cell in COLUMNS.values()))
    return table


def _apart(rows: list[Record], title: str) -> Table:
    table = _narrow(title)
    names = ("prompts", "xgreedy", "acc", "cache")
    table.add_column("method")
    for kind in ("loop", "no loop"):
        for name in names:
            table.add_column(f"{kind}\n{name}", justify="right", overflow="fold")
    for row in rows:
        cells = [row["method"]]
        for kind in ("looping", "not_looping"):
            part = row[kind]
            if part is None:
                cells += ["-"] * len(names)
                continue
            cells += [
                str(part["prompts"]),
                number(part["speedup_vs_greedy"]),
                number(part["mean_accepted"]),
                percent(part["cache_share"]),
            ]
        table.add_row(*cells)
    return table


def _speedups(records: list[Record], methods: list[str], title: str) -> Table:
    table = _narrow(title)
    others = [m for m in methods if m != "greedy"]
    learned = [m for m in methods if m.startswith("hybrid")]
    for name in ("dataset", "prompts", *others, *(f"{m} / picked" for m in learned)):
        table.add_column(name, justify="left" if name == "dataset" else "right", overflow="fold")
    by_dataset: dict[str, dict[str, Record]] = {}
    for record in records:
        by_dataset.setdefault(record["dataset"], {})[record["method"]] = record
    for dataset, rows in by_dataset.items():
        prompts = next(iter(rows.values()))["prompts"]
        cells = [number(rows[m]["speedup_vs_greedy"]) if m in rows else "-" for m in others]
        cells += [spread(rows[m], "over_best_rule") if m in rows else "-" for m in learned]
        table.add_row(dataset, str(prompts), *cells)
    return table
