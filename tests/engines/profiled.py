"""Serve on vLLM after a start without time: ``python -m tests.engines.profiled JOB RESULT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from decoder.engines.vllm import profile
from decoder.engines.vllm.hooks import adapter_of
from tests.engines.plugged import engine_of, worker_in


def main(job_file: str, result_file: str) -> None:
    """Run one job."""
    job = json.loads(Path(job_file).read_text())
    profile.CPU_SECONDS, profile.PROFILE_EVERY = 0.0, 0  # type: ignore[misc]
    from vllm import SamplingParams, TokensPrompt

    from decoder.core.profiling import Profile

    llm = engine_of(job)
    profile.CPU_SECONDS = 6.0  # type: ignore[misc]
    worker = worker_in(llm)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    adapter: Any = adapter_of(runner)
    held: list[dict[str, Any]] = []
    timed, take = list[int](), Profile.take

    def noting(self: Profile, *steps: Any, **rest: Any) -> bool:
        ended = take(self, *steps, **rest)
        timed.append(len(self.target))
        return ended

    Profile.take = noting  # type: ignore[method-assign]

    def serve() -> None:
        """One request, which ends; then the engine has a step without tokens."""
        parameters = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        prompt = TokensPrompt(prompt_token_ids=job["prompt"])
        (output,) = llm.generate([prompt], parameters, use_tqdm=False)
        held.append({
            "tokens": list(output.outputs[0].token_ids),
            "doubted": adapter.profile.doubted,
            "plain_us": worker.router.costs.table.time(1),
        })  # fmt: skip
        llm.llm_engine.step()

    serve()
    while adapter.profile.doubted and len(held) < 40:
        serve()
    serve()
    Path(result_file).write_text(
        json.dumps({"held": held, "timed": timed, "faults": worker.faults})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
