"""Measure a drafter in an unmodified vLLM: accepted tokens a cycle, by kind of prompt.

The figures are vLLM's own speculative-decoding counters. They count a draft that runs past the end
of an answer in full, so short answers look slightly better than they are.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decoder.contracts.errors import SettingsError
from pipelines.prompts import Message, read_folder
from pipelines.workloads import WORKLOADS, prompts

Messages = Sequence[Message]


@dataclass(frozen=True)
class Measured:
    """Counters of one set of prompts, decoded greedily."""

    name: str
    prompts: int
    tokens: int
    drafts: int
    accepted: float
    """Mean accepted tokens of a cycle."""
    by_position: tuple[float, ...]
    """Share of cycles that accepted the draft at each place."""


def workload_prompts(count: int) -> dict[str, list[Messages]]:
    """The first ``count`` held-out prompts of each workload."""
    return {
        w: [p.messages for p in itertools.islice(prompts(w, "heldout"), count)] for w in WORKLOADS
    }


def _counters(llm: Any) -> dict[str, list[int]]:
    counted = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_"):
            values = getattr(metric, "values", None) or [metric.value]
            counted[metric.name.removeprefix("vllm:spec_decode_")] = list(values)
    return counted


def measure(
    model: Path,
    drafter: Path,
    sets: Mapping[str, Sequence[Messages]],
    k: int = 4,
    answer: int = 128,
    context: int = 2048,
    log: Callable[[Measured], None] = lambda _: None,
) -> list[Measured]:
    """Decode every set greedily in float32, ``k`` drafts a cycle, without prompts too long.

    ``log`` is called with the figures of each set as it ends.
    """
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=context,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": k,
        },
    )
    tokenizer = llm.get_tokenizer()
    parameters = SamplingParams(temperature=0.0, max_tokens=answer)
    results = []
    for name, conversations in sets.items():
        ids = [
            tokenizer.apply_chat_template(list(m), add_generation_prompt=True, return_dict=False)
            for m in conversations
        ]
        fitting = [{"prompt_token_ids": i} for i in ids if len(i) + answer + k < context]
        if not fitting:
            continue
        before = _counters(llm)
        answers = llm.generate(fitting, parameters, use_tqdm=False)
        after = _counters(llm)

        def grown(counter: str, a: dict[str, list[int]] = after, b: Any = before) -> list[int]:
            return [x - y for x, y in zip(a[counter], b.get(counter, [0] * k), strict=False)]

        drafts = grown("num_drafts")[0]
        results.append(
            Measured(
                name,
                len(fitting),
                sum(len(a.outputs[0].token_ids) for a in answers),
                drafts,
                grown("num_accepted_tokens")[0] / max(1, drafts),
                tuple(n / max(1, drafts) for n in grown("num_accepted_tokens_per_pos")),
            )
        )
        log(results[-1])
    return results


def show(results: list[Measured]) -> Table:
    """A table of ``results``."""
    table = Table("prompts", "n", "tokens", "cycles", "accepted a cycle", "by place")
    for r in results:
        places = " ".join(f"{p:.2f}" for p in r.by_position)
        table.add_row(
            r.name, str(r.prompts), str(r.tokens), str(r.drafts), f"{r.accepted:.2f}", places
        )
    return table


def save(results: list[Measured], path: Path) -> None:
    """Write ``results`` as JSON."""
    path.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


def main() -> None:
    """``python -m pipelines.drafter.measure MODEL DRAFTER [--prompts DIR] ...``."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--count", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--prompts", type=Path, help="folder of JSONL files with `messages`")
    parser.add_argument("--names", nargs="*", default=[], help="limit those files, by stem")
    parser.add_argument("--save", type=Path, help="write the figures of the workloads here")
    asked = parser.parse_args()
    console, sets = Console(), workload_prompts(asked.count)
    own = len(sets)
    if asked.prompts:
        problems: list[str] = []
        try:
            for found in read_folder(asked.prompts, asked.names, problems):
                sets[found.name] = [p.messages for p in found.prompts[: asked.count]]
        except SettingsError as error:
            parser.error(str(error))
        for problem in problems:
            console.print(problem)
    results = measure(
        asked.model,
        asked.drafter,
        sets,
        log=lambda m: console.print(f"{m.name}: {m.accepted:.3f} accepted, {m.drafts} cycles"),
    )
    console.print(show(results))
    for name, part in (("workloads", results[:own]), ("prompt files", results[own:])):
        cycles = sum(m.drafts for m in part)
        if cycles:
            accepted = sum(m.accepted * m.drafts for m in part) / cycles
            console.print(f"{name}: {accepted:.3f} accepted over {cycles} cycles")
    if asked.save:
        save(results[:own], asked.save)


if __name__ == "__main__":
    main()
