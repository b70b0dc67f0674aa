"""Decode on one rank or on several: ``python -m tests.engines.rank_engine JOB RESULT``.

The job holds ``model``, ``drafter`` or null, ``ranks``, ``max_tokens`` and ``rounds``: each the
name of what befalls the ranks, see ``rank_probe``, and the prompts that are decoded then. Further
``backend``, vLLM's name of what starts the ranks or null, and ``there``, variables that only the
ranks see which this process starts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

LONGEST = 64


def main(job_file: str, result_file: str) -> None:
    """Run one job."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.plugins import load_general_plugins

    from decoder.engines.vllm import consistency
    from tests.engines import rank_probe

    job = json.loads(Path(job_file).read_text())
    drafter = job["drafter"]
    if job["there"]:
        load_general_plugins()  # it loads them once a process: the ranks come to theirs later
        _start_ranks_with(job["there"])
    consistency.TIMEOUT_S = 10.0  # type: ignore[misc]
    llm = LLM(
        job["model"], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4,
        max_num_batched_tokens=128, enable_prefix_caching=True, tensor_parallel_size=job["ranks"],
        distributed_executor_backend=job["backend"],
        speculative_config=drafter
        and {
            "method": "eagle3", "model": drafter, "num_speculative_tokens": LONGEST,
            "disable_padded_drafter_batch": True,
        },
    )  # fmt: skip
    parameters = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    result: dict[str, Any] = {"tokens": [], "ranks": []}
    for name, prompts in job["rounds"]:
        if drafter:
            llm.collective_rpc(rank_probe.begin, args=(name,))
        asked = [TokensPrompt(prompt_token_ids=p) for p in prompts]
        outputs = llm.generate(asked, parameters, use_tqdm=False)
        result["tokens"].append([list(o.outputs[0].token_ids) for o in outputs])
        if drafter:
            result["ranks"].append(llm.collective_rpc(rank_probe.end))
    Path(result_file).write_text(json.dumps(result))


def _start_ranks_with(variables: dict[str, str]) -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    start = MultiprocExecutor._init_executor

    def started(executor: Any) -> None:
        with mock.patch.dict(os.environ, variables):
            start(executor)

    MultiprocExecutor._init_executor = started


if __name__ == "__main__":
    main(*sys.argv[1:3])
