"""The plugin on the other vLLM that it supports, as far as its Python tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from decoder.engines.vllm import contract
from tests.engines.other_vllm import environment, mixture

ROOT = Path(__file__).parents[2]
OTHER = "0.33.0"


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment(OTHER), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.long
def test_the_contract_file_equals_the_sources() -> None:
    contract.check(OTHER, mixture(OTHER))


@pytest.mark.long
def test_adapter_and_graphs_work_on_the_other_vllm() -> None:
    tests = ("contract", "graphs", "adapter", "faults", "v2")
    run("-m", "pytest", "-q", "-n", "0", *(f"tests/engines/test_vllm_{name}.py" for name in tests))


@pytest.mark.long
def test_the_engine_contract_holds_on_the_other_vllms_v2_runner() -> None:
    run("-m", "pytest", "-q", "-n", "0", "-m", "long or not long", "-k", "v2 and ahead",
        "tests/engines/test_contract.py")  # fmt: skip


@pytest.mark.long
def test_answers_equal_plain_v1_on_the_other_vllms_async_v2_runner() -> None:
    run("-m", "pytest", "-q", "-n", "0", "-m", "long or not long", "-k", "eagle3 and True",
        "tests/engines/test_vllm_v2.py")  # fmt: skip


@pytest.mark.release
def test_outputs_equal_plain_vllm_on_the_other_vllm() -> None:
    tests = ("test_contract", "test_vllm_thinking", "test_vllm_v2")
    run("-m", "pytest", "-q", "-n", "0", "-m", "long or not long",
        *(f"tests/engines/{name}.py" for name in tests))  # fmt: skip
