"""What the tests of the serving benchmark share: setups to compare and something to ask."""

from __future__ import annotations

from pipelines.bench.serve.counters import Counters
from pipelines.bench.serve.load import Reply
from pipelines.bench.serve.passes import Level
from pipelines.bench.serve.setups import Setup
from pipelines.prompts import Prompt
from pipelines.serve.command import ServeOptions

NONE, SUFFIX = Setup("none", "none"), Setup("suffix-k8", "suffix", 8)
EAGLE3, HYBRID = Setup("eagle3-k3", "eagle3", 3, True), Setup("hybrid", "hybrid")
OPTIONS = ServeOptions("owner/model", "owner/head", port=8123, served_name="m")


def asked(text: str, dataset: str = "d") -> Prompt:
    return Prompt(text, dataset, "f", ({"role": "user", "content": text},))


def level(rate: float, tokens: tuple[int, ...] = (1, 2), concurrency: int = 1) -> Level:
    reply = Reply("d:a", 0.5, 1.5, tokens)
    counters = Counters(tokens=2, drafts=1, drafted=4, accepted=1, steps=1)
    return Level(concurrency, len(tokens) / rate, (reply,), counters, cpu_s=40.0 / rate)
