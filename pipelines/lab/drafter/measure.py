"""Measure a drafter in an unmodified vLLM: accepted tokens a cycle, by kind of prompt.

The figures are vLLM's own speculative-decoding counters. They count a draft that runs past the end
of an answer in full, so short answers look slightly better than they are.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from pipelines.prompts import read_folder
from pipelines.workloads import WORKLOADS, prompts

DRAFTED, ANSWER, CONTEXT = 4, 128, 2048
"""Tokens: drafted a cycle, of an answer, and of prompt and answer together."""


def counted(metrics: list[Any]) -> NDArray[np.int64]:
    """Cycles, then accepted drafts by place: int64 (1 + :data:`DRAFTED`,)."""
    of = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in metrics}
    if "drafts" not in of:
        return np.zeros(1 + DRAFTED, np.int64)
    return np.array([of["drafts"].value, *of["accepted_tokens_per_pos"].values], np.int64)


def told(name: str, of: NDArray[np.int64]) -> str:
    """One line of a set of prompts, or of several together."""
    places = of[1:] / max(1, of[0])
    spelled = " ".join(f"{share:.2f}" for share in places)
    return f"{name}: {places.sum():.3f} accepted over {of[0]} cycles (by place {spelled})"


def main() -> None:
    """``python -m pipelines.lab.drafter.measure MODEL DRAFTER [--prompts DIR]``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("drafter")
    parser.add_argument("--count", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--prompts", type=Path, help="folder of JSONL files with `messages`")
    asked, problems, say = parser.parse_args(), list[str](), Console().print
    sets: list[tuple[str, str, Any]] = [("workloads", w, prompts(w, "heldout")) for w in WORKLOADS]
    found = read_folder(asked.prompts, (), problems) if asked.prompts else ()
    sets += [("prompt files", s.name, s.prompts) for s in found]
    for problem in problems:
        say(problem)
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    drafting = {"method": "eagle3", "model": asked.drafter, "num_speculative_tokens": DRAFTED}
    stock = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False}
    llm = LLM(asked.model, max_model_len=CONTEXT, speculative_config=drafting, **stock)
    greedy, whole = SamplingParams(temperature=0.0, max_tokens=ANSWER), dict[str, Any]()
    for group, name, some in sets:
        messages = [list(p.messages) for p in itertools.islice(some, asked.count)]
        ids = llm.get_tokenizer().apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        fitting = [{"prompt_token_ids": i} for i in ids if len(i) + ANSWER + DRAFTED < CONTEXT]
        before = counted(llm.get_metrics())
        if fitting:
            llm.generate(fitting, greedy, use_tqdm=False)
        of = counted(llm.get_metrics()) - before
        whole[group] = whole.get(group, 0) + of
        say(told(f"{name}, {len(fitting)} prompts", of))
    for group, of in whole.items():
        say(told(group, of))


if __name__ == "__main__":
    main()
