"""A request ends for the router where it ends for vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

from decoder.engines.vllm.plugin import LABEL_LIMIT, _options


@pytest.mark.parametrize(
    ("ignores", "ends"), [(False, {2, 0, 7}), (True, {7})], ids=["heeds", "ignores"]
)
def test_ends_of_text_that_a_request_ignores_do_not_end_it(ignores: bool, ends: set[int]) -> None:
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=5, stop_token_ids=[7], ignore_eos=ignores)
    asked.update_from_generation_config({"eos_token_id": [2, 0]}, eos_token_id=2)
    assert _options(asked, 128).stop_ids == ends


def test_labels_from_a_client_are_cut_and_speculation_can_be_switched_off() -> None:
    from vllm import SamplingParams

    extra = {"hvd_workload": "w" * 1000, "hvd_speculate": "OFF"}
    options = _options(SamplingParams(extra_args=extra), 128)
    assert options.workload == "w" * LABEL_LIMIT and not options.speculate
    assert options.max_tokens <= 128


@pytest.mark.parametrize("module", ["decoder.engines.vllm.plugin", "pipelines.cli"])
def test_what_starts_before_vllm_brings_no_llvm(module: str) -> None:
    """vLLM's CPU worker looks through every module for kernels and fails on llvmlite's."""
    code = f"import sys, {module}; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
