"""The plugin loads on the vLLM it was made for; around its methods the original runs once."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from decoder.contracts.errors import EngineError
from decoder.engines.vllm.hooks import adapter_of, attach
from decoder.engines.vllm.plugin import AROUND, _load_model
from decoder.settings import WorkerSettings
from tests.engines.configs import config, setting
from tests.engines.plugged import worker_of
from tests.engines.scheduled import Scheduled
from tests.engines.test_vllm_adapter import copying

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


class Worker:
    """As much of vLLM's worker as is looked at; counts the calls of its own methods."""

    def __init__(self, settings: Any) -> None:
        self.vllm_config = settings
        self.model_runner = SimpleNamespace(cudagraph_dispatcher=SimpleNamespace())
        self.calls: list[Any] = []

    def original(self, worker: Any, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "theirs"


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    from vllm.distributed import parallel_state

    level = logging.getLogger("decoder").level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
        yield
    logging.getLogger("decoder").setLevel(level)


@pytest.fixture
def worker() -> Worker:
    e = Scheduled(config("suffix"), copying)
    made = Worker(e.config)
    attach(made.model_runner, e.adapter)
    return made


def test_a_setting_is_refused_before_weights_are_loaded() -> None:
    made = Worker(config("suffix"))
    setting("parallel_config.pipeline_parallel_size", 2)(made.vllm_config)
    with pytest.raises(EngineError, match="set --pipeline-parallel-size 1"):
        _load_model(WorkerSettings(), made.original, made)
    assert not made.calls and adapter_of(made.model_runner) is None


def test_reloaded_weights_disable_drafting(worker: Worker) -> None:
    result = _load_model(WorkerSettings(), worker.original, worker, load_dummy_weights=True)
    assert result == "theirs" and worker.calls == [((), {"load_dummy_weights": True})]
    adapter = adapter_of(worker.model_runner)
    assert adapter is not None and "restart the server" in adapter.disabled


def test_log_lines_at_start_are_shown_though_vllm_configures_logging_later(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "decoder"), caplog.at_level(logging.INFO, "vllm"):
        _load_model(WorkerSettings(), worker.original, worker)
        assert logging.getLogger("decoder").isEnabledFor(logging.INFO)


@pytest.mark.parametrize(
    ("name", "arguments", "rests"),
    [
        ("sleep", {}, False), ("sleep", {"level": 1}, False), ("sleep", {"level": 2}, True),
        ("reload_weights", {"weights_path": "x"}, True), ("reset_weights", {}, True),
    ],
)  # fmt: skip
def test_only_changed_weights_disable_drafting(
    name: str, arguments: dict[str, Any], rests: bool, worker: Worker
) -> None:
    assert AROUND[name](worker.original, worker, **arguments) == "theirs"
    adapter = adapter_of(worker.model_runner)
    assert adapter is not None and bool(adapter.disabled) == rests and len(worker.calls) == 1


def test_shutdown_closes_the_worker_and_detaches_the_adapter(worker: Worker) -> None:
    router = worker_of(worker.model_runner).router
    closed = []
    router.close = lambda: closed.append(True)  # type: ignore[method-assign]
    for _ in range(2):
        assert AROUND["shutdown"](worker.original, worker) == "theirs"
    assert closed == [True] and adapter_of(worker.model_runner) is None


def test_without_an_adapter_the_originals_run() -> None:
    made = Worker(None)
    del made.model_runner
    assert AROUND["shutdown"](made.original, made) == "theirs"
    runner, told = SimpleNamespace(), SimpleNamespace(total_num_scheduled_tokens=3)
    for name, arguments in (
        ("execute_model", (told,)),
        ("propose_draft_token_ids", (told, [[1]], "metadata")),
    ):
        assert AROUND[name](made.original, runner, *arguments) == "theirs"
    assert AROUND["_input_fits_in_drafter"](made.original, runner, None) is True
    assert [args for args, _ in made.calls[1:]] == [(told,), (told, [[1]], "metadata"), (None,)]


def test_cache_drafts_go_on_beyond_the_drafters_context(worker: Worker) -> None:
    ended = SimpleNamespace(max_seq_len=10**6)
    assert AROUND["_input_fits_in_drafter"](worker.original, worker.model_runner, ended) is True
    assert not worker.calls


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ("pass", ""),
        ("os.environ['HVD_WORKER_NAME'] = 'mine'", ""),
        ("os.environ['HVD_WORKER_TENANTS'] = 'client'",
         "rank 0 has HVD_WORKER_TENANTS client where the process that started it has "
         "HVD_WORKER_TENANTS shared: "),
        ("attach(runner, None)", "rank 0 runs without this plugin, "),  # it was not loaded there
        ("sys.modules['decoder'] = None", "rank 0 runs without this plugin, "),
    ],
)  # fmt: skip
def test_all_workers_are_compared_with_the_process_that_started_them(node: str, says: str) -> None:
    """Each in a process of its own, which gets what vLLM sends: a pickled function."""
    script = (
        "import os, pickle, sys\nfrom types import SimpleNamespace\n"
        "from decoder.engines.vllm.hooks import attach\n"
        f"runner = SimpleNamespace()\nattach(runner, runner)\n{node}\n"
        "if sys.modules['decoder'] is None:\n"
        "    for name in [name for name in sys.modules if name.startswith('decoder.')]:\n"
        "        del sys.modules[name]\n"
        "asked = pickle.load(sys.stdin.buffer)\n"
        "answer = asked(SimpleNamespace(model_runner=runner))\n"
        "pickle.dump(answer, sys.stdout.buffer)"
    )

    class Executor:
        def collective_rpc(self, method: Any) -> list[Any]:
            run = subprocess.run(
                [sys.executable, "-c", script], input=cloudpickle.dumps(method),
                capture_output=True, check=True,
            )  # fmt: skip
            return [pickle.loads(run.stdout)]

    raised = ""
    try:
        made = AROUND["get_kv_cache_specs"](lambda executor: "theirs", Executor())
        assert made == "theirs"
    except EngineError as error:
        raised = str(error)
    assert raised.startswith(says) and bool(raised) == bool(says), raised
