"""The figures of ``hvd bench decode`` in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from rich.box import SIMPLE
from rich.table import Table

Record = dict[str, Any]


def number(value: float | None, digits: int = 2) -> str:
    """``value`` for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share for a table."""
    return "-" if value is None else f"{value:.0%}"


COLUMNS: Final[dict[str, Callable[[Record], str]]] = {
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


def table(summary: dict[str, Any]) -> Table:
    """Every method over all prompts, template by template."""
    made = Table(
        title=f"{summary['prompts']} prompts", title_justify="left", box=SIMPLE, padding=(0, 0),
        pad_edge=False, show_edge=False,
    )  # fmt: skip
    for name in COLUMNS:
        first = name == "method"
        made.add_column(name, justify="left" if first else "right", overflow="fold", no_wrap=first)
    for template in summary["settings"]["templates"]:
        if len(summary["settings"]["templates"]) > 1:
            made.add_row(f"[bold]template {template}")
        for record in summary["overall"]:
            if record["template"] == template:
                made.add_row(*(cell(record) for cell in COLUMNS.values()))
    return made


def facts(title: str, found: Mapping[Any, Any]) -> Table:
    """The figures of one measurement by the names that ``--json`` gives them, a row each."""
    made = Table("", "", title=title, show_header=False)
    for name, value in found.items():
        for key, one in value.items() if isinstance(value, dict) else [("", value)]:
            said = f"{one:,.4g}" if isinstance(one, float) else "-" if one is None else f"{one}"
            made.add_row(f"{name} {key}".rstrip().replace("_", " "), said)
    return made
