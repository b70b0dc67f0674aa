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
    """``python -m pipelines.drafter.measure MODEL DRAFTER [--prompts DIR]``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--count", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--prompts", type=Path, help="folder of JSONL files with `messages`")
    asked, problems = parser.parse_args(), list[str]()
    sets: list[tuple[str, str, Any]] = [("workloads", w, prompts(w, "heldout")) for w in WORKLOADS]
    found = read_folder(asked.prompts, (), problems) if asked.prompts else ()
    sets += [("prompt files", s.name, s.prompts) for s in found]
    print("\n".join(problems), end="")  # noqa: T201
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    drafting = {"method": "eagle3", "model": str(asked.drafter), "num_speculative_tokens": DRAFTED}
    llm = LLM(
        str(asked.model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT,
        disable_log_stats=False,
        speculative_config=drafting,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER)
    whole: dict[str, NDArray[np.int64]] = {}
    for group, name, some in sets:
        texts = [
            llm.get_tokenizer().apply_chat_template(
                list(p.messages), add_generation_prompt=True, return_dict=False
            )
            for p in itertools.islice(some, asked.count)
        ]
        fitting = [{"prompt_token_ids": t} for t in texts if len(t) + ANSWER + DRAFTED < CONTEXT]
        before = counted(llm.get_metrics())
        if fitting:
            llm.generate(fitting, greedy, use_tqdm=False)
        of = counted(llm.get_metrics()) - before
        whole[group] = whole[group] + of if group in whole else of
        print(told(f"{name}, {len(fitting)} prompts", of), flush=True)  # noqa: T201
    for group, of in whole.items():
        print(told(group, of))  # noqa: T201


if __name__ == "__main__":
    main()
