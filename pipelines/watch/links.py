"""Where a registry shows the versions of a scope."""

from __future__ import annotations

from urllib.parse import quote

import httpx

from decoder.contracts.redacted import for_anybody


def versions_at(tracking_uri: str, scope: str, shown_at: str = "") -> str:
    """Address of MLflow's page of a version, but for its number, which comes last; "" where the
    registry is no server, does not answer, or has no model of ``scope``.

    It is asked as MLflow's REST reference says: whoever only links need not import mlflow.

    Args:
        shown_at: where its pages are, if not at ``tracking_uri``.
    """
    if not scope or not tracking_uri.startswith("http"):
        return ""
    try:
        answer = httpx.get(
            f"{tracking_uri}/api/2.0/mlflow/registered-models/search",
            params={"filter": f"tags.scope = '{scope}'", "max_results": "1"},
            timeout=2.0,
        )
        (model,) = answer.raise_for_status().json().get("registered_models", [])
        return f"{shown_at or for_anybody(tracking_uri)}/#/models/{quote(model['name'])}/versions/"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return ""
