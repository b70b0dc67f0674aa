"""A request ends for the router where it ends for vLLM."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from decoder.contracts.identity import DIGITS, Pseudonyms
from decoder.engines.vllm.asked import LABEL_LIMIT, choice_of, options_of
from decoder.requests import RequestOptions

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


def _options(parameters: Any, max_model_len: int, name: str = "chatcmpl-1") -> RequestOptions:
    return options_of(name, parameters, max_model_len, Pseudonyms(b"k" * 32))


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


def test_no_name_that_a_client_chose_reaches_telemetry() -> None:
    from vllm import SamplingParams

    secret = "secret " * 1000
    asked = SamplingParams(extra_args={"hvd_tenant": secret})
    first, second = (_options(asked, 128, f"{i}_chatcmpl-{secret}-8f2e") for i in (0, 1))
    assert first.opaque == second.opaque and (first.choice, second.choice) == (0, 1)
    assert len(first.opaque) == len(first.tenant) == DIGITS
    assert "secret" not in repr(first)
    assert _options(SamplingParams(), 128).tenant == ""


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("chatcmpl-8f2e", (0, "chatcmpl-8f2e")),
        ("12_cmpl-8f2e-0", (12, "cmpl-8f2e-0")),
        ("x_1", (0, "x_1")),
        ("99999_x", (0, "99999_x")),
        ("_", (0, "_")),
        ("", (0, "")),
    ],
)
def test_choices_of_one_request_are_told_apart(name: str, choice: tuple[int, str]) -> None:
    assert choice_of(name) == choice


@pytest.mark.parametrize("module", ["decoder.engines.vllm.plugin", "pipelines.cli"])
def test_what_starts_before_vllm_brings_no_llvm(module: str) -> None:
    """vLLM's CPU worker looks through every module for kernels and fails on llvmlite's."""
    code = f"import sys, {module}; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
