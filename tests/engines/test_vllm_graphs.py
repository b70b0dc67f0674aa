"""Which CUDA graph a step runs on, by vLLM's own configuration, runner and dispatcher; no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decoder.engines.vllm.hooks import attach
from decoder.engines.vllm.plugin import _load_model
from decoder.settings import WorkerSettings
from tests.engines.configs import engine
from tests.engines.scheduled import Scheduled
from tests.engines.test_vllm_adapter import copying
from tests.engines.test_vllm_plugin import Worker, one_rank  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""What vLLM takes by default, without speculation too."""


def on_a_gpu(
    mode: str | None = None,
    sizes: list[int] | None = None,
    backend: str = "flash_attn.FlashAttentionBackend",
) -> Any:
    """A worker as it would be on a GPU once our plugin has loaded the model and vLLM has chosen its
    graphs; its runner has only what is read for that. ``mode`` and ``sizes`` are a person's."""
    from vllm.config.compilation import CompilationMode, CUDAGraphMode
    from vllm.config.vllm import OPTIMIZATION_LEVEL_TO_CONFIG
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    config = engine("suffix", num_speculative_tokens=64)
    config.scheduler_config.max_num_seqs = 126
    config.scheduler_config.max_num_batched_tokens = 8192
    graphs = config.compilation_config
    graphs.mode, graphs.splitting_ops = CompilationMode.VLLM_COMPILE, None
    graphs.cudagraph_mode = CUDAGraphMode[mode] if mode else None
    graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size = sizes, None
    config._apply_optimization_level_defaults(
        OPTIMIZATION_LEVEL_TO_CONFIG[config.optimization_level]
    )
    config._set_cudagraph_sizes()
    graphs.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)

    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.vllm_config, runner.compilation_config = config, graphs
    for name in ("model", "parallel", "speculative", "scheduler"):
        setattr(runner, f"{name}_config", getattr(config, f"{name}_config"))
    runner.device = torch.device("cuda")
    runner.max_num_reqs, runner.max_num_tokens, runner.kv_cache_config = 126, 8192, None
    runner.input_batch = SimpleNamespace(lora_id_to_lora_request={})
    runner.uniform_decode_query_len = 1 + config.num_speculative_tokens
    runner.cudagraph_dispatcher = CudagraphDispatcher(config)

    worker = Worker(config)
    worker.model_runner = runner
    attach(runner, Scheduled(engine("suffix"), copying).adapter)
    _load_model(WorkerSettings(), worker.original, worker)
    kind = resolve_obj_by_qualname(f"vllm.v1.attention.backends.{backend}")
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    runner._check_and_update_cudagraph_mode([{kind}], [KVCacheGroupSpec(["layer"], spec)])
    return worker


def step(worker: Any, *tokens: int) -> tuple[str, int]:
    """On which kind of graph a step runs whose requests have so many tokens each, and how many
    tokens it has there."""
    mode, batch, *_ = worker.model_runner._determine_batch_execution_and_padding(
        num_tokens=sum(tokens),
        num_reqs=len(tokens),
        num_scheduled_tokens_np=np.array(tokens, np.int32),
        max_num_scheduled_tokens=max(tokens),
    )
    return mode.name, batch.num_tokens


@pytest.fixture(scope="module")
def default() -> Any:
    return on_a_gpu()


@pytest.mark.parametrize(
    ("requests", "padded"), [(1, 1), (2, 2), (3, 4), (8, 8), (64, 64), (100, 104), (120, 120)]
)
def test_a_step_without_drafts_runs_on_a_full_graph_of_its_size(
    requests: int, padded: int, default: Any
) -> None:
    assert step(default, *[1] * requests) == ("FULL", padded)


@pytest.mark.parametrize(
    ("tokens", "padded"),
    [((2,), 2), ((9,), 16), ((65,), 65), ((1, 9, 33), 48), ((3, 3), 8), ((65, 65, 1), 136)],
)
def test_a_step_that_verifies_drafts_runs_on_a_piecewise_graph_of_its_size(
    tokens: tuple[int, ...], padded: int, default: Any
) -> None:
    assert step(default, *tokens) == ("PIECEWISE", padded)


def test_no_size_is_lost_to_speculation(default: Any) -> None:
    sizes = default.model_runner.compilation_config.cudagraph_capture_sizes
    assert set(SIZES) <= set(sizes) and max(sizes) == max(SIZES)


@pytest.mark.parametrize(
    ("mode", "plain", "drafted"),
    [
        ("FULL_AND_PIECEWISE", ("FULL", 1), ("PIECEWISE", 16)),
        ("PIECEWISE", ("PIECEWISE", 1), ("PIECEWISE", 16)),
        ("FULL_DECODE_ONLY", ("FULL", 1), ("NONE", 9)),
        ("FULL", ("FULL", 1), ("FULL", 16)),
        ("NONE", ("NONE", 1), ("NONE", 9)),
    ],
)
def test_a_configured_graph_mode_stays(
    mode: str, plain: tuple[str, int], drafted: tuple[str, int]
) -> None:
    worker = on_a_gpu(mode, backend="flex_attention.FlexAttentionBackend")
    assert worker.model_runner.compilation_config.cudagraph_mode.name == mode
    assert (step(worker, 1), step(worker, 9)) == (plain, drafted)


def test_configured_graph_sizes_stay() -> None:
    worker = on_a_gpu(sizes=[16, 64])
    assert worker.model_runner.compilation_config.cudagraph_capture_sizes == [16, 64]
    assert (step(worker, 1), step(worker, 20)) == (("FULL", 16), ("PIECEWISE", 64))
