"""Serve on vLLM after a profile without time: ``python -m tests.engines.profiled JOB RESULT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from decoder.engines.vllm import profile
from tests.engines.plugged import engine_of, worker_in


def main(job_file: str, result_file: str) -> None:
    """Run one job: from profile number ``job["enough"]`` on there is time for several sizes."""
    job = json.loads(Path(job_file).read_text())
    from vllm import SamplingParams, TokensPrompt

    from decoder.core.profiling import Profile

    timed, measure = list[int](), Profile.measure

    def noting(self: Profile, *steps: Any) -> None:
        measure(self, *steps)
        timed.append(len(self.target))
        if len(timed) == job["enough"]:
            profile.CPU_SECONDS = 6.0  # type: ignore[misc]

    Profile.measure = noting  # type: ignore[method-assign]
    profile.CPU_SECONDS = 0.0  # type: ignore[misc]
    llm = engine_of(job)
    parameters = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = TokensPrompt(prompt_token_ids=job["prompt"])
    (output,) = llm.generate([prompt], parameters, use_tqdm=False)
    worker = worker_in(llm)
    made = {
        "timed": timed,
        "tokens": list(output.outputs[0].token_ids),
        "plain_us": worker.router.costs.table.time(1),
        "faults": worker.faults,
    }
    Path(result_file).write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
