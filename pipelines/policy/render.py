"""Policies as tables, and as plain values for ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from pipelines.policy.options import Model


def model_json(model: Model) -> dict[str, Any]:
    """A model and its versions, ascending."""
    standing = model.standing
    return {
        "name": standing.name,
        "scope": standing.scope,
        "target": standing.tags.get("target", ""),
        "drafter": standing.tags.get("drafter", ""),
        "served": standing.served,
        "versions": [
            {
                "version": version.number,
                "aliases": list(version.aliases),
                "made": datetime.fromtimestamp(version.created, UTC).isoformat(),
                "tags": dict(version.tags),
            }
            for version in model.versions
        ],
    }


def versions_table(model: dict[str, Any]) -> Table:
    """The versions of a :func:`model_json`, newest first."""
    table = Table(title=escape(model["name"]), caption=f"scope {model['scope']}")
    for heading in ("version", "alias", "kind", "made", "origin", "why"):
        table.add_column(heading, overflow="fold")
    for version in reversed(model["versions"]):
        tags, number = version["tags"], str(version["version"])
        table.add_row(
            f"[bold]{number}[/bold]" if version["version"] == model["served"] else number,
            ", ".join(version["aliases"]),
            tags.get("kind", ""),
            version["made"][:19].replace("T", " "),
            tags.get("origin", ""),
            escape(tags.get("why") or tags.get("verdict", "")),
        )
    return table


def comparison_tables(found: Sequence[dict[str, Any]], one: str, other: str) -> tuple[Table, Table]:
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
