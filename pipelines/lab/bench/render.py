"""Figures in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from rich.box import SIMPLE
from rich.table import Table

Cell = Callable[[dict[str, Any]], str]


def number(value: float | None, digits: int = 2) -> str:
    """``value`` for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share for a table."""
    return "-" if value is None else f"{value:.0%}"


COLUMNS: Final[dict[str, Cell]] = {
    "method": lambda r: r["method"],
    "tok/s": lambda r: number(r["tok_per_s"], 1),
    "speed": lambda r: number(r["speedup_vs_greedy"]),
    "cyc/1K": lambda r: number(r["cycles_per_1k"], 0),
    "ms/cyc": lambda r: number(r["ms_per_cycle"], 1),
    "acc": lambda r: number(r["mean_accepted"]),
    "cache": lambda r: percent(r["cache_share"]),
    "model": lambda r: percent(r["model_share"]),
    "oracle": lambda r: percent(r["fraction_of_oracle"]),
    "loops": lambda r: percent(r["loop_share"]),
    "same": lambda r: {True: "yes", False: "NO", None: "-"}[r["exact"]],
}
"""Of ``hvd bench decode``, by method."""


def table(title: str, columns: Mapping[str, Cell], records: Iterable[dict[str, Any]]) -> Table:
    """A row for each of ``records``; the first column stands left and is not broken."""
    made = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0), show_edge=False)
    for at, name in enumerate(columns):
        made.add_column(name, justify="right" if at else "left", overflow="fold", no_wrap=not at)
    for record in records:
        made.add_row(*(cell(record) for cell in columns.values()))
    return made


def facts(title: str, found: Mapping[str, Any]) -> Table:
    """The figures of one measurement by the names that ``--json`` gives them, a row each."""
    made = Table("", "", title=title, show_header=False)
    for name, value in found.items():
        for key, one in value.items() if isinstance(value, dict) else [("", value)]:
            said = f"{one:,.4g}" if isinstance(one, float) else "-" if one is None else f"{one}"
            made.add_row(f"{name} {key}".rstrip().replace("_", " "), said)
    return made
