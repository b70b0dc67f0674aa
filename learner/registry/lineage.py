"""What a version says of its making: description, parameters, and the data set it learned from.

Of the window that a policy was trained on these keys are known beside plain numbers:

===========================  ===================================================================
``topic``, ``offsets``       records read when it was made: by partition, the next one
``time_from``, ``time_to``   of the drafts it may have learned from, in seconds since the epoch
``errors``                   rows of time, champion's and candidate's mean absolute error in tokens
``thresholds``               rows of threshold and rate, of the kinds that have a threshold
===========================  ===================================================================
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

TABLES: Final = ("errors", "thresholds")
"""Drawn, not listed."""
PACKAGE: Final = "hybrid-verified-decoding"


def parameters(policy: Policy, window: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the run, from what the policy is and what it was trained on."""
    plain = {f"window.{key}": value for key, value in window.items() if key not in TABLES}
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
    """Markdown for a version's page."""
    made_by = {"learner": "learned from traffic", "first": "the first policy", "person": "by hand"}
    origin = made_by.get(tags.get("origin", ""), tags.get("origin", "of unknown origin"))
    lines = [f"Policy of kind **{policy.kind}**, {origin}."]
    if "verdict" in tags:
        lines += ["", f"Gate: {tags['verdict']}."]
    table = {
        "learned by": params.get("learner"),
        "parent": f"version {params['champion']}" if params.get("champion") else None,
        "drafts": _counted(window),
        "records": _read(window),
        "times": _times(window),
        "costs": _costs(policy),
        "model draft": f"{policy.model_payoff:.2f} tokens accepted" if policy.model_payoff else "",
        "code": ", ".join(code_version().values()),
    }
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in table.items() if value]
    return "\n".join(lines)


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


def _counted(window: Mapping[str, Any]) -> str:
    if "events" not in window:
        return ""
    return f"the newest {window['events']:,} of {window.get('events_total', 0):,}"


def _read(window: Mapping[str, Any]) -> str:
    if not window.get("offsets"):
        return ""
    ends = ", ".join(f"{p} before {offset}" for p, offset in sorted(window["offsets"].items()))
    return f"`{window.get('topic', '')}`, partition {ends}"


def _times(window: Mapping[str, Any]) -> str:
    if not window.get("time_to"):
        return ""
    ends = (datetime.fromtimestamp(window[key], UTC) for key in ("time_from", "time_to"))
    return " to ".join(f"{end:%Y-%m-%d %H:%M:%S}" for end in ends) + " UTC"


def _costs(policy: Policy) -> str:
    costs = policy.provenance.get("costs")
    if not isinstance(costs, dict) or "fixed_us" not in costs:
        return ""
    if not costs.get("measured"):
        return "nominal: none were measured"
    return f"a step {costs['fixed_us'] / 1e3:.1f} ms, a token more {costs['token_us'] / 1e3:.2f} ms"
