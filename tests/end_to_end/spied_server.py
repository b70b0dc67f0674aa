"""vLLM's server, except that each lookup writes down how much of its draft is new to its request.

Run as a program with vLLM's own arguments; ``SPIED_DRAFTS`` names the file. A line is the number of
the draft's tokens that the request's own text does not hold: text of others.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from decoder.engines.vllm import plugin


def spy() -> None:
    make = plugin._adapter

    def made(*arguments: Any) -> Any:
        spy_on_the_router()
        return make(*arguments)

    plugin._adapter = made


def spy_on_the_router() -> None:
    sys.path.append(str(Path(__file__).parents[2]))  # this is run as a program
    from decoder.core.router import DraftRouter  # as late as the plugin: it brings numba
    from decoder.core.tracker import Tracker
    from tests.engines.trials import drafts_in

    path, texts = Path(os.environ["SPIED_DRAFTS"]), dict[str, set[int]]()
    start, observe, choose = Tracker.start, DraftRouter.observe, DraftRouter.choose

    def started(self: Any, name: str, prompt: Any, options: Any, output: Any = ()) -> None:
        texts[name] = {*prompt.tolist(), *output}
        start(self, name, prompt, options, output)

    def observed(self: Any, report: Any) -> None:
        begin = 0
        for name, end in zip(report.names, report.advanced["end"].tolist(), strict=True):
            texts.setdefault(name, set()).update(report.tokens[begin:end].tolist())
            begin = end
        observe(self, report)

    def chosen(self: Any, report: Any) -> Any:
        decisions = choose(self, report)
        with path.open("a") as file:
            for name, _, _, tokens in drafts_in(self, report.names):
                file.write(f"{len({*tokens} - texts[name])}\n")
        return decisions

    Tracker.start, DraftRouter.observe = started, observed  # type: ignore[method-assign]
    DraftRouter.choose = chosen  # type: ignore[method-assign]


spy()  # in each process that vLLM starts from this program: the engine has one of its own
if __name__ == "__main__":
    sys.argv = ["vllm", *sys.argv[1:]]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
