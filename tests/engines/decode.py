"""Run a trial on vLLM in a process of its own: ``python -m tests.engines.decode JOB RESULT``.

The job holds ``model``, ``max_model_len``, ``speculative_config`` and ``asks``; a thread keeps
replacing the policy while requests run. With ``ahead`` it is vLLM's V2 runner, whose steps are
scheduled ahead or not, or as vLLM has it. What else the process is to show before its engine starts
is the module ``beside``: a start takes long.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoder.engines.vllm import contract
from tests.engines import interpreted
from tests.engines.plugged import engine_of, events_in, worker_in


def swap_forever(router: Any, stop: threading.Event) -> None:
    """Replace the policy every few milliseconds, each time under a new version."""
    from tests.engines.trials import swapped_policies

    version = 0
    while not stop.wait(0.005):
        for policy in swapped_policies():
            version += 1
            router.policy = replace(policy, version=version)
            stop.wait(0.002)


def main(job_file: str, result_file: str) -> None:
    """Run one job."""
    job = json.loads(Path(job_file).read_text())
    gc.disable()  # of what is imported none is garbage, and sources stay as they are
    contract.read = functools.cache(contract.read)
    if "ahead" in job:
        interpreted.install(job["ahead"])
    beside = importlib.import_module(job["beside"]).main() if job["beside"] else {}
    gc.freeze()

    from vllm import SamplingParams, TokensPrompt

    llm = engine_of(job)
    worker = worker_in(llm)

    # Not before the engine: the router brings numba (decoder.engines.vllm.plugin says why).
    from tests.engines.trials import Ask, counts_of, note_drafts

    asks = [Ask(**ask) for ask in job["asks"]]
    noted, stop = note_drafts(worker.router), threading.Event()
    swapper = threading.Thread(target=swap_forever, args=(worker.router, stop))
    swapper.start()
    parameters = [
        SamplingParams(
            temperature=0, max_tokens=ask.max_tokens, stop_token_ids=ask.stop_ids,
            extra_args={
                "hvd_workload": ask.workload, "hvd_speculate": "on" if ask.speculate else "off",
            },
        )
        for ask in asks
    ]  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=ask.prompt) for ask in asks]
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    stop.set()
    swapper.join()
    worker.router.close()
    events = [e._asdict() for e in events_in(worker) if e.draft_len]
    result = {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "finish": [o.outputs[0].finish_reason for o in outputs],
        "noted": noted,
        "counts": counts_of(worker.router, worker.faults),
        "events": [{k: v for k, v in e.items() if k != "features"} for e in events],
        "beside": beside,
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
