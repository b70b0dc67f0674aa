"""Policies as tables, and as plain values for ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from decoder.contracts.bundle import Policy
from learner.registry import Version
from learner.registry.moves import Move
from pipelines.policy.asked import Model


def listed(model: Model) -> dict[str, Any]:
    """A model and its versions, plain."""
    standing = model.standing
    return {
        "name": standing.name,
        "scope": standing.scope,
        "target": standing.tags.get("target", ""),
        "drafter": standing.tags.get("drafter", ""),
        "served": standing.served,
        "versions": [_plain(version) for version in model.versions],
    }


def list_table(model: Model) -> Table:
    """The versions of a model, newest first."""
    standing = model.standing
    table = Table(title=escape(standing.name), caption=f"scope {standing.scope}")
    for heading in ("version", "alias", "kind", "made", "origin", "why"):
        table.add_column(heading, overflow="fold")
    for version in reversed(model.versions):
        served = version.number == standing.served
        table.add_row(
            f"[bold]{version.number}[/bold]" if served else str(version.number),
            ", ".join(version.aliases),
            version.tags.get("kind", ""),
            _time(version.created),
            version.tags.get("origin", ""),
            escape(version.tags.get("why") or version.tags.get("verdict", "")),
        )
    return table


def told(
    model: Model, version: Version, policy: Policy, figures: tuple[dict[str, float], dict[str, str]]
) -> dict[str, Any]:
    """All that is known of a version, plain."""
    metrics, params = figures
    return {
        "name": model.standing.name,
        "scope": model.scope,
        **_plain(version),
        "description": version.description,
        "policy": {
            "kind": policy.kind,
            "threshold": policy.threshold,
            "use_model": policy.use_model,
            "model_payoff": policy.model_payoff,
            "layers": [list(weight.shape) for weight, _ in policy.layers],
            "provenance": policy.provenance,
        },
        "metrics": metrics,
        "params": params,
        "run": version.run,
    }


def history(moves: Sequence[Move]) -> list[dict[str, Any]]:
    """Moves, plain, oldest first."""
    return [asdict(move) | {"at": move.at.isoformat()} for move in moves]


def history_table(model: Model, moves: Sequence[Move]) -> Table:
    """Who moved what, newest first."""
    table = Table(title=escape(model.standing.name))
    for heading in ("when, UTC", "alias", "from", "to", "who", "why"):
        table.add_column(heading, overflow="fold")
    for move in reversed(moves):
        ends = ("-" if end is None else str(end) for end in (move.before, move.after))
        when = f"{move.at:%Y-%m-%d %H:%M:%S}"
        table.add_row(when, move.alias, *ends, escape(move.by), escape(move.why))
    return table


def _plain(version: Version) -> dict[str, Any]:
    return {
        "version": version.number,
        "aliases": list(version.aliases),
        "made": datetime.fromtimestamp(version.created, UTC).isoformat(),
        "tags": dict(version.tags),
    }


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
