"""Policies as tables, and as plain values for ``--json``."""

from __future__ import annotations

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
