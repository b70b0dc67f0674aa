"""A demo's fault: the drafter of a running worker breaks, and is mended.

The service has no switch for it: vLLM mixes a class of one's own into its worker
(``--worker-extension-cls``), and in its development mode calls that class's methods by HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx

from decoder.contracts.errors import ProcessError

OPTIONS: Final = ("--", "--worker-extension-cls", f"{__name__}.Breakage")
"""What a worker that can break is served with."""
SETTINGS: Final[Mapping[str, str]] = {"VLLM_SERVER_DEV_MODE": "1"}
SECONDS: Final = 60.0


class Breakage:
    """What is mixed into vLLM's worker; it runs between two steps."""

    model_runner: Any  # the worker's

    def set_drafter_broken(self, broken: str) -> None:
        """Negate the drafter's last norm, so that it proposes what it holds least likely, or put it
        right again. Mutates its weights in place.

        Args:
            broken: "yes" or "no", as vLLM passes nothing but text; said twice it does no more.
        """
        norm = self.model_runner.drafter.model.model.norm
        if (broken == "yes") != getattr(norm, "hvd_broken", False):
            norm.weight.data.neg_()
            norm.hvd_broken = broken == "yes"


def set_broken(url: str, broken: bool) -> None:
    """Break or mend the drafter of the worker at ``url``.

    Raises:
        ProcessError: the worker did not do it.
    """
    body = {"method": "set_drafter_broken", "args": ["yes" if broken else "no"]}
    try:
        asked = httpx.post(f"{url}/collective_rpc", json=body, timeout=SECONDS, trust_env=False)
        asked.raise_for_status()
    except httpx.HTTPError as error:
        what = f"the drafter could not be {'broken' if broken else 'mended'} for the demo"
        raise ProcessError(f"{what}: {error}. See the worker's log.") from error
