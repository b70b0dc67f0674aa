"""What a version says of its making: description, parameters, and the data set it learned from.

Of the window that a policy was trained on ``topic`` and ``offsets`` (records read when it was made:
by partition, the next one) and ``time_from``, ``time_to`` (of the drafts it may have learned from,
in seconds since the epoch) are known beside plain numbers.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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


def dataset_input(window: Mapping[str, Any]) -> Any | None:
    """The drafts learned from as one of MLflow's data sets; None where nothing says which."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if not window.get("topic"):
        return None
    source = {key: window[key] for key in ("topic", "offsets") if key in window}
    profile = {
        key: window[key]
        for key in ("events", "events_total", "time_from", "time_to")
        if key in window
    }
    told = json.dumps({**source, **profile}, sort_keys=True)
    data = Dataset(
        name=str(window["topic"]),
        digest=hashlib.sha256(told.encode()).hexdigest()[:8],
        source_type="kafka",
        source=json.dumps(source),
        profile=json.dumps(profile),
    )
    return DatasetInput(data, [InputTag("mlflow.data.context", "training")])


def description(
    policy: Policy, params: Mapping[str, Any], tags: Mapping[str, str], window: Mapping[str, Any]
) -> str:
    """Markdown for a version's page; the run has what it was learned from."""
    made_by = {"learner": "learned from traffic", "first": "the first policy", "person": "by hand"}
    origin = made_by.get(tags.get("origin", ""), tags.get("origin", "of unknown origin"))
    lines = [f"Policy of kind **{policy.kind}**, {origin}, by code {code_version()['code']}."]
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


@cache
def code_version() -> dict[str, str]:
    """Release of the project, and the commit of a checkout, as tags that MLflow's page knows."""
    found = {}
    try:
        found["code"] = version(PACKAGE)
    except PackageNotFoundError:
        found["code"] = "unreleased"
    here = Path(__file__).parent
    asked = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return found
    if told.returncode == 0:
        found["mlflow.source.git.commit"] = told.stdout.strip()
    return found
