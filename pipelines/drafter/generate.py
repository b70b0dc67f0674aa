"""Step 1: the target answers prompts; what it writes is what the drafter learns to predict.

Prompts come from the project's workloads (``train`` side) and from the target itself: given the
opening of a user turn, a chat model writes an instruction of its own (the Magpie method,
arXiv 2406.08464), which covers what no template of ours thinks of. Half the answers are greedy,
half sampled, since a service sees both.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.workloads import WORKLOADS, prompts

SELF_INSTRUCTED_SHARE = 0.5
CHUNK = 96
"""Requests handed to vLLM at once: progress is saved after each chunk."""
MAX_PROMPT, MAX_ANSWER = 640, 192
CONCURRENCY = 48


def _workload_prompts(tokenizer: Any) -> Iterator[list[int]]:
    streams = [prompts(w, "train") for w in WORKLOADS]
    for prompt in itertools.chain.from_iterable(zip(*streams, strict=True)):
        yield tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )


def _self_instructions(llm: Any, tokenizer: Any, count: int) -> list[list[int]]:
    """``count`` user turns written by the target itself, each as prompt token ids."""
    from vllm import SamplingParams

    empty = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=False
    )
    opening = empty[: empty.rindex(tokenizer.eos_token)]
    parameters = SamplingParams(
        temperature=1.0, top_p=0.95, max_tokens=96, stop=[tokenizer.eos_token]
    )
    ids = tokenizer(opening, add_special_tokens=False)["input_ids"]
    written = llm.generate([{"prompt_token_ids": ids}] * count, parameters, use_tqdm=False)
    asked = [w.outputs[0] for w in written]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": a.text.strip()}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for a in asked
        if a.finish_reason == "stop" and len(a.text.strip()) > 12
    ]


def generate(model: Path, out: Path, tokens: int, dtype: str) -> int:
    """Append answers of ``model`` to ``out`` until it holds ``tokens`` answer tokens.

    Resumable: what ``out`` holds already is counted, and its prompts are skipped. Each line is
    ``{"prompt": [ids], "output": [ids], "temperature": t}``.

    Returns:
        the number of answer tokens in ``out``.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from rich.progress import Progress
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    done = [json.loads(line) for line in out.open()] if out.exists() else []
    have, chunk_index = sum(len(d["output"]) for d in done), len(done) // CHUNK
    if have >= tokens:
        return have
    llm = LLM(
        str(model),
        dtype=dtype,
        seed=chunk_index,  # vLLM's CPU sampler takes no seed per request
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=CONCURRENCY,
    )
    source = itertools.islice(_workload_prompts(tokenizer), len(done), None)
    with out.open("a") as sink, Progress() as progress:
        bar = progress.add_task("generating", total=tokens, completed=have)
        while have < tokens:
            asked = _self_instructions(llm, tokenizer, int(CHUNK * SELF_INSTRUCTED_SHARE))
            asked += itertools.islice(source, CHUNK - len(asked))
            asked = [ids for ids in asked if len(ids) <= MAX_PROMPT]
            parameters = [
                SamplingParams(temperature=t, max_tokens=MAX_ANSWER)
                for t in itertools.islice(itertools.cycle((0.0, 0.7)), len(asked))
            ]
            answers = llm.generate(
                [{"prompt_token_ids": ids} for ids in asked], parameters, use_tqdm=False
            )
            for ids, p, answer in zip(asked, parameters, answers, strict=True):
                output = list(answer.outputs[0].token_ids)
                record = {"prompt": ids, "output": output, "temperature": p.temperature}
                sink.write(json.dumps(record) + "\n")
                have += len(output)
            sink.flush()
            chunk_index += 1
            progress.update(bar, completed=have)
    return have
