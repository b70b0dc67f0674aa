"""Breaks the drafter of a running worker for the demo, and repairs it.

vLLM mixes a class into its worker (``--worker-extension-cls``), and in its development mode calls
the class's methods by HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx

from decoder.contracts.errors import ProcessError

OPTIONS: Final = ("--", "--worker-extension-cls", f"{__name__}.Breakage")
"""Options of a worker that can be broken."""
SETTINGS: Final[Mapping[str, str]] = {"VLLM_SERVER_DEV_MODE": "1"}
SECONDS: Final = 60.0


class Breakage:
    """Mixed into vLLM's worker; its method runs between two steps."""

    model_runner: Any  # the worker's

    def set_drafter_broken(self, broken: str) -> None:
        """Negate the drafter's last norm, so that it proposes the least likely tokens, or restore
        it. Mutates its weights in place.

        Args:
            broken: "yes" or "no", since vLLM passes strings only; repeating it has no effect.
        """
        norm = self.model_runner.drafter.model.model.norm
        if (broken == "yes") != getattr(norm, "hvd_broken", False):
            norm.weight.data.neg_()
            norm.hvd_broken = broken == "yes"


def set_broken(url: str, broken: bool) -> None:
    """Break or repair the drafter of the worker at ``url``.

    Raises:
        ProcessError: the worker did not do it.
    """
    body = {"method": "set_drafter_broken", "args": ["yes" if broken else "no"]}
    try:
        response = httpx.post(f"{url}/collective_rpc", json=body, timeout=SECONDS, trust_env=False)
        response.raise_for_status()
    except httpx.HTTPError as error:
        what = f"the drafter could not be {'broken' if broken else 'mended'} for the demo"
        raise ProcessError(f"{what}: {error}. See the worker's log.") from error
