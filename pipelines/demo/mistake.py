"""A person's mistake: a policy that drafts nothing is made champion by hand.

The same command does it that anybody would give. What follows is the service's own: the worker's
floor puts the best fixed method in force where it finds the policy behind, and the learner's gate
judges every champion against the policy before it, the one that ships among them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import ProcessError
from decoder.policy.probes import to_bytes
from pipelines.stack.running import HVD, TRACKING_VARIABLE, Stack
from pipelines.watch.ledger import Ledger

NEVER: Final = 1e9
"""Accepted tokens that no draft is expected to reach."""
SECONDS: Final = 120.0
WHY: Final = "a mistake: it drafts nothing"


def promote(stack: Stack, scope: str, folder: Path) -> int:
    """Make a policy champion that drafts nothing; its version.

    Raises:
        ProcessError: it could not be promoted; with what the command said.
    """
    policy = Policy(scope, 0, NEVER, "frequency", use_model=False)
    bundle = folder / "drafts-nothing.safetensors"
    bundle.write_bytes(to_bytes(policy))
    told = _hvd(stack, "promote", str(bundle), "--force", "--why", WHY, "--scope", scope)
    return int(told["to"])


def reason(stack: Stack, scope: str) -> str:
    """Why the version that is served now was made champion, as the registry has it.

    Raises:
        ProcessError: it could not be asked.
    """
    (model,) = _hvd(stack, "list", "--scope", scope)
    tags = {one["version"]: one["tags"] for one in model["versions"]}
    return str(tags.get(model["served"], {}).get("why", ""))


def _hvd(stack: Stack, *arguments: str) -> Any:
    """What ``hvd policy`` prints as JSON."""
    try:
        done = subprocess.run(
            [*HVD, "policy", *arguments, "--json"],
            env={**os.environ, TRACKING_VARIABLE: stack.tracking_uri},
            capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        what = f"'hvd policy {arguments[0]}' did not work in the demo"
        raise ProcessError(f"{what}: {said} See the registry's log.") from error


def outcome(ledger: Ledger, version: int) -> dict[str, Any]:
    """What became of ``version`` on the worker: seconds after it came into force until the floor
    relieved it, and until another policy was in force; null is not yet."""
    switches = ledger.policy_switches()
    came = next((at for at, v in switches if v == version), None)
    if came is None:
        return {"version": version, "in_force": False, "relieved_s": None, "taken_back_s": None}
    gone = next((at for at, v in switches if at > came and v != version), None)
    floor = (s.time for s in list(ledger.statuses) if s.policy_version == version and s.fallback)
    relieved = next(floor, None)
    return {
        "version": version,
        "in_force": True,
        "relieved_s": None if relieved is None else round(relieved - came, 1),
        "taken_back_s": None if gone is None else round(gone - came, 1),
    }
