"""A request ends for the router where it ends for vLLM."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from decoder.contracts.identity import DIGITS
from decoder.core.requests import RequestOptions
from decoder.engines.vllm.asked import choice_of, options_of
from decoder.tenancy.identities import Identities, Source

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


def _options(
    parameters: Any, max_model_len: int, name: str = "chatcmpl-1", source: Source = "client"
) -> RequestOptions:
    return options_of(name, parameters, max_model_len, Identities(b"k" * 32, source))


@pytest.mark.parametrize(
    ("ignores", "ends"), [(False, {2, 0, 7}), (True, {7})], ids=["heeds", "ignores"]
)
def test_ends_of_text_that_a_request_ignores_do_not_end_it(ignores: bool, ends: set[int]) -> None:
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=5, stop_token_ids=[7], ignore_eos=ignores)
    asked.update_from_generation_config({"eos_token_id": [2, 0]}, eos_token_id=2)
    assert _options(asked, 128).stop_ids == ends


def test_labels_from_a_client_are_hashed_and_speculation_can_be_switched_off() -> None:
    from vllm import SamplingParams

    extra = {"hvd_workload": "w" * 1000, "hvd_speculate": "OFF"}
    options = _options(SamplingParams(extra_args=extra), 128)
    assert len(options.workload) == DIGITS and not options.speculate
    assert _options(SamplingParams(extra_args={"hvd_workload": "chat"}), 128).workload == "chat"
    assert options.max_tokens <= 128 and _options(SamplingParams(), 128).speculate


def test_a_request_with_a_budget_for_thinking_has_no_drafts_and_a_minimum_is_kept() -> None:
    from vllm import SamplingParams

    assert not _options(SamplingParams(thinking_token_budget=0), 128).speculate
    assert _options(SamplingParams(max_tokens=9, min_tokens=7), 128).min_tokens == 7


def test_no_name_that_a_client_chose_reaches_telemetry() -> None:
    from vllm import SamplingParams

    secret = "secret " * 1000
    extra = {"hvd_tenant": secret, "hvd_session": secret, "hvd_workload": secret}
    asked = SamplingParams(extra_args=extra)
    first, second = (_options(asked, 128, f"{i}_chatcmpl-{secret}-8f2e") for i in (0, 1))
    assert first.opaque == second.opaque and (first.choice, second.choice) == (0, 1)
    names = (first.opaque, first.tenant, first.session, first.workload)
    assert {len(name) for name in names} == {DIGITS} and len(set(names)) == 4
    assert "secret" not in repr(first) and first.key == second.key != ""


def test_who_a_request_belongs_to_is_what_was_sealed_or_believed() -> None:
    from vllm import SamplingParams

    identities = Identities(b"k" * 32, "middleware")
    whose = identities.make("an api key", "salt", "a session", "req-1")
    sealed = SamplingParams(extra_args=identities.sealed(whose))
    options = _options(sealed, 128, "1_chatcmpl-req-1-8f2e", "middleware")
    told = (options.tenant, options.session, options.opaque, options.key, options.choice)
    assert told == (whose.tenant, whose.session, whose.request, whose.key, 1)
    client = SamplingParams(extra_args={"hvd_tenant": "somebody"})
    assert _options(client, 128, source="client").key != _options(client, 128, source="shared").key
    assert _options(SamplingParams(), 128, source="shared").tenant == ""


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
