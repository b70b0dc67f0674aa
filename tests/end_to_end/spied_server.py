"""vLLM's server, except that each lookup writes down how much of its draft is new to its request.

Run as a program with vLLM's own arguments; ``SPIED_DRAFTS`` names the file. A line is the number of
the draft's tokens that the request's own text does not hold: text of others.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from decoder.drafting.drafts import CacheDraft
from decoder.engines.vllm import plugin

Proposing = Callable[..., list[CacheDraft | None]]


def spied(propose: Proposing) -> Proposing:
    path = Path(os.environ["SPIED_DRAFTS"])

    def proposing(
        cache: Any, requests: list[str], contexts: list[np.ndarray], *rest: Any
    ) -> list[CacheDraft | None]:
        drafts = propose(cache, requests, contexts, *rest)
        with path.open("a") as file:
            for draft, context in zip(drafts, contexts, strict=True):
                both = [] if draft is None else [draft, draft.rival]
                shown = {token for one in both if one is not None for token in one.tokens}
                file.write(f"{len(shown - {*context.tolist()})}\n")
        return drafts

    return proposing


def spy() -> None:
    make = plugin._adapter

    def made(*arguments: Any) -> Any:
        from decoder.drafting.suffix import SuffixCache  # as late as the plugin: it brings numba

        SuffixCache.propose_all = spied(SuffixCache.propose_all)  # type: ignore[method-assign]
        return make(*arguments)

    plugin._adapter = made


spy()  # in each process that vLLM starts from this program: the engine has one of its own
if __name__ == "__main__":
    sys.argv = ["vllm", *sys.argv[1:]]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
