"""A vLLM engine in this process or one of its own, and the worker that is plugged into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from decoder.engines.vllm.hooks import adapter_of

if TYPE_CHECKING:  # not before the engine: it brings numba (decoder.engines.vllm.plugin says why)
    from vllm import LLM

    from decoder.telemetry.ring import Ring
    from decoder.worker import Worker
    from tests.events import DraftEvent


def real(test: Any) -> Any:
    """Mark what starts engines for minutes."""
    return pytest.mark.engine(pytest.mark.long(test))


def engine_of(job: Mapping[str, Any]) -> LLM:
    """The engine of a job with ``model``, ``max_model_len`` and ``speculative_config``."""
    from vllm import LLM

    return LLM(
        job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=4,
        speculative_config=job["speculative_config"],
    )


def worker_in(llm: LLM) -> Worker:
    """The hybrid worker of an engine that runs in this process; it keeps its events from now on."""
    worker = worker_of(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    keep_events(worker)
    return worker


def keep_events(worker: Worker) -> Ring:
    """Where the events of a worker without telemetry lie from now on."""
    from decoder.core.events import Sink
    from decoder.telemetry.ring import Ring

    ring = Ring(1_000_000)
    worker.router.requests.sink = Sink(ring)
    return ring


def events_in(worker: Worker) -> list[DraftEvent]:
    """The events that such a worker keeps."""
    from tests.decoder.telemetry.telling import events_in

    return events_in(worker.router.requests.sink.ring)  # type: ignore[arg-type]


def worker_of(runner: Any) -> Worker:
    """The hybrid worker of a model runner that has one."""
    adapter = adapter_of(runner)
    assert adapter is not None and adapter.worker is not None
    return adapter.worker


def run_apart(module: str, folder: Path, job: Mapping[str, Any], **variables: str) -> Any:
    """What ``module`` makes of a job in a process of its own, where vLLM has its engine in it;
    fails if it does."""
    job_file, result_file = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(job))
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HVD_WORKER_TELEMETRY": "0",
        **variables,
    }
    run = subprocess.run(
        [sys.executable, "-m", module, str(job_file), str(result_file)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return json.loads(result_file.read_text())
