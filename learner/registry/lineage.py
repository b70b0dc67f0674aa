"""What a version says of its making: description and parameters.

Of the window that a policy was trained on ``topic`` and ``offsets`` (records read when it was made:
by partition, the next one) and ``time_from``, ``time_to`` (of the drafts it may have learned from,
in seconds since the epoch) are known beside plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from decoder.contracts.bundle import Policy
from decoder.contracts.features import SCHEMA_ID

PACKAGE: Final = "hybrid-verified-decoding"


def parameters(policy: Policy, window: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the run, from what the policy is and what it was trained on."""
    plain = {f"window.{key}": value for key, value in window.items()}
    offsets = plain.pop("window.offsets", {})
    plain |= {f"window.offset_{partition}": offset for partition, offset in offsets.items()}
    return {
        "kind": policy.kind,
        "threshold": policy.threshold,
        "use_model": policy.use_model,
        "schema_id": policy.schema_id,
        **plain,
    }


def description(
    policy: Policy, params: Mapping[str, Any], tags: Mapping[str, str], window: Mapping[str, Any]
) -> str:
    """Markdown for a version's page; the run has what it was learned from."""
    made_by = {"learner": "learned from traffic", "first": "the first policy", "person": "by hand"}
    origin = made_by.get(tags.get("origin", ""), tags.get("origin", "of unknown origin"))
    lines = [f"Policy of kind **{policy.kind}**, {origin}, by code {code_version()}."]
    if "verdict" in tags:
        lines += [f"Gate: {tags['verdict']}."]
    if params.get("champion"):
        lines += [f"It won over version {params['champion']}."]
    if window.get("time_to"):
        ends = (datetime.fromtimestamp(window[key], UTC) for key in ("time_from", "time_to"))
        lines += ["Drafts of " + " to ".join(f"{end:%Y-%m-%d %H:%M:%S}" for end in ends) + " UTC."]
    return "\n\n".join(lines)


def model_description(scope: str, served: Mapping[str, str]) -> str:
    """Markdown for a registered model's page."""
    of = f"`{served['target']}`" if "target" in served else "a target"
    drafter = f"drafter `{served['drafter']}`" if served.get("drafter") else "no model drafter"
    return (
        f"When to verify a cache draft for {of} with {drafter}: scope `{scope}`, features "
        f"`{SCHEMA_ID}`.\n\nAlias `champion` is served, `pinned` goes before it; a version under "
        "alias `trial` is compared with what is served."
    )


def code_version() -> str:
    """Release of the project."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unreleased"
