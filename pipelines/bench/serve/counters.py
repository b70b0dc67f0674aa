"""vLLM's own counters, read from a server's ``/metrics`` page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

PREFIX: Final = "vllm:"
NAMES: Final = {
    "tokens": "generation_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "cached_prompt_tokens": "prompt_tokens_cached_total",
    "drafts": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "steps": "iteration_tokens_total_count",
}


@dataclass(frozen=True)
class Counters:
    """Counters of one server, or their growth between two readings.

    ``drafts`` are verifications that had anything to verify. ``accepted`` counts a draft that runs
    past the end of an answer in full, so it is a little high where answers are short. ``steps`` are
    the engine's, each for all running requests at once.
    """

    tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def since(self, earlier: Counters) -> Counters:
        """Growth after ``earlier``."""
        return Counters(*(getattr(self, n) - getattr(earlier, n) for n in NAMES))


def parse(page: str) -> Counters:
    """Read a page in Prometheus' text format; a counter that is not there counts zero.

    Several engines behind one server are added up.
    """
    sums = dict.fromkeys(NAMES.values(), 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if name != sample.name and name in sums:
                sums[name] += sample.value
    return Counters(*(int(sums[NAMES[n]]) for n in NAMES))


def settled(read: Callable[[], str], tokens: int, wait: Callable[[], None]) -> Counters:
    """Counters once they hold the ``tokens`` that clients were sent.

    The server counts a step after it has sent the step's tokens.

    Args:
        read: fetches the page.
        wait: called between readings; raises to give up.
    """
    while (counters := parse(read())).tokens < tokens:
        wait()
    return counters
