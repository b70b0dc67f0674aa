"""Work that the first start would do, done at the end of the set-up.

It writes Python byte code, lets vLLM inspect its model classes, and compiles the decoder's loops.
All of it is cached on disk. If a step fails here, the first start does it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pipelines import embedded

VLLM: Final = """
import sys
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
from concurrent.futures import ThreadPoolExecutor
from vllm import ModelRegistry
with ThreadPoolExecutor() as threads:
    list(threads.map(lambda name: ModelRegistry.models[name].inspect_model_cls(), sys.argv[1:]))
"""
"""For the worker: imports its modules and inspects the classes of its models."""
SERVICES: Final = """
import uvicorn, mlflow.server.fastapi_app, mlflow.store.db.utils, mlflow.cli
import learner.__main__, learner.loop
import decoder.worker, decoder.core.filtering
"""
"""For registry, learner and decoder, whose loops are compiled when imported."""


def prepare() -> list[str]:
    """Prepare everything in parallel.

    Returns:
        a sentence for each part that failed.

    Raises:
        ModelError: the embedded model cannot be expanded.
    """
    configs = [folder / "config.json" for folder in (embedded.ensure_model(), embedded.DRAFTER)]
    names = [n for file in configs for n in json.loads(file.read_text()).get("architectures", ())]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}

    def run(what: str, program: str, *arguments: str) -> str:
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [*done.stderr.strip().splitlines()[-1:], "no reason"]
        return f"{what} could not be prepared: {lines[0]}" if done.returncode else ""

    with ThreadPoolExecutor() as threads:  # an interrupt reaches and ends both
        started = [
            threads.submit(run, "vLLM", VLLM, *names),
            threads.submit(run, "what serves and learns", SERVICES),
        ]
    return [sentence for one in started if (sentence := one.result())]


if __name__ == "__main__":
    for sentence in prepare():
        sys.stderr.write(f"{sentence}. The first start does it.\n")
