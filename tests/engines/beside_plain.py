"""Decode a file of prompts with vLLM in a process of its own; the tests compare what comes out.

``python -m tests.engines.beside_plain JOB RESULT``, where the job holds ``model``, ``prompts`` as
message lists, ``max_tokens``, ``max_model_len``, ``speculative_config`` or null, and ``swap``:
whether a thread keeps replacing the policy while requests run.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from tests.engines.decode import swap_forever
from tests.engines.plugged import engine_of, events_in, worker_in


def main(job_file: str, result_file: str) -> None:
    """Run one job."""
    from vllm import SamplingParams

    job = json.loads(Path(job_file).read_text())
    llm = engine_of(job)
    stop, worker, swapper = threading.Event(), None, None
    if job["speculative_config"]:
        worker = worker_in(llm)
        if job["swap"]:
            swapper = threading.Thread(target=swap_forever, args=(worker.router, stop))
            swapper.start()
    parameters = [
        SamplingParams(temperature=0, max_tokens=job["max_tokens"], extra_args=extra)
        for extra in job["extra_args"]
    ]
    outputs = llm.chat(job["prompts"], parameters, use_tqdm=False)
    result: dict[str, Any] = {"tokens": [list(o.outputs[0].token_ids) for o in outputs]}
    if worker is not None:
        stop.set()
        if swapper is not None:
            swapper.join()
        worker.router.close()
        events = [e._asdict() for e in events_in(worker) if e.draft_len]
        result["status"] = worker.status().model_dump()
        result["events"] = [{k: e[k] for k in e if k != "features"} for e in events]
        result["last_version"] = worker.router.policy.version
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
