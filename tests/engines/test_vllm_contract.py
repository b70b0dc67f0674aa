"""The plugin loads on the vLLMs it knows, and says what differs on any other."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from decoder.contracts.errors import EngineError, SettingsError
from decoder.engines.vllm import contract
from decoder.engines.vllm.hooks import HOOKS, Hook, install
from decoder.engines.vllm.plugin import AROUND, register

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
NUMBER, SOURCES = contract.installed()


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the installed vLLM that are touched; they may be changed and put back."""
    folder = tmp_path_factory.mktemp("sources")
    for file in [p for p in (SOURCES / "vllm").rglob("*.py") if "model_executor" not in p.parts]:
        there = folder / file.relative_to(SOURCES)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, there)
    return folder


def test_the_installed_vllm_is_supported_and_every_contract_holds_all_hooks() -> None:
    contract.check(NUMBER, SOURCES)
    assert {"0.32", "0.33"} == set(contract.SUPPORTED)
    places = {
        h.owner if h.kind == "fields" else f"{h.owner}{'.' if ':' in h.owner else ':'}{name}"
        for h in HOOKS
        for name in h.each()
    }
    for series in contract.SUPPORTED:
        said = json.loads((contract.FOLDER / f"vllm-{series}.json").read_text())
        assert said.keys() == places
        assert all({*h.each()} == said[h.owner].keys() for h in HOOKS if h.kind == "fields")
    wrapped = {name for hook in HOOKS if hook.kind == "wrapped" for name in hook.each()}
    assert wrapped == {"load_model", *AROUND}
    assert all(hook.why for hook in HOOKS)


@pytest.mark.parametrize(
    ("module", "was", "is_now", "says"),
    [
        ("v1/worker/gpu_model_runner.py", "def _input_fits_in_drafter(\n        self,",
         "def _input_fits_in_drafter(\n        self, more,",
         "._input_fits_in_drafter takes (more, common_attn_metadata) where (common_attn_metadata)"),
        ("v1/worker/gpu_model_runner.py", "def _input_fits_in_drafter(",
         "def _fits(", "there is no vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits"),
        ("v1/core/sched/output.py", "num_spec_tokens_to_schedule: int", "num_spec_tokens: int",
         "SchedulerOutput has no num_spec_tokens_to_schedule"),
        ("v1/core/sched/output.py", "total_num_scheduled_tokens: int",
         "total_num_scheduled_tokens: list[int]",
         "total_num_scheduled_tokens is list[int] where int was expected"),
        ("v1/sample/rejection_sampler.py", "def apply_penalties(", "def apply_penalties_to(",
         "there is no vllm.v1.sample.rejection_sampler:RejectionSampler.apply_penalties"),
        ("v1/worker/gpu_worker.py", "def shutdown(self) -> None:",
         "def shutdown(self) -> None:\n        print('new')",
         "the body of vllm.v1.worker.gpu_worker:Worker.shutdown has changed"),
        ("v1/worker/gpu_worker.py", "class Worker(", "class Labourer(",
         "there is no vllm.v1.worker.gpu_worker:Worker._make_model_runner"),
        ("v1/worker/gpu/model_runner.py", "draft_tokens[:, num_spec_tokens:] = -1",
         "draft_tokens[:, num_spec_tokens:] = 0",
         "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens has changed"),
        ("v1/core/sched/output.py", "num_acceptable_drafts:", "num_accepted_drafts:",
         "GrammarOutput has no num_acceptable_drafts"),
    ],
)  # fmt: skip
def test_each_kind_of_difference_is_refused_in_one_sentence(
    copied: Path, module: str, was: str, is_now: str, says: str
) -> None:
    file = copied / "vllm" / module
    text = file.read_text()
    assert was in text
    try:
        file.write_text(text.replace(was, is_now))
        with pytest.raises(EngineError) as refusal:
            contract.check(NUMBER, copied)
    finally:
        file.write_text(text)
    told = str(refusal.value)
    assert says in told and told.endswith("or unset HVD_WORKER_ENABLED.") and told.count(". ") == 0


def test_comments_and_docstrings_are_no_difference(copied: Path) -> None:
    file = copied / "vllm" / "v1" / "worker" / "gpu_worker.py"
    text = file.read_text()
    was = "def shutdown(self) -> None:"
    file.write_text(text.replace(was, f'{was}\n        """Said anew."""\n        # why\n\n'))
    contract.check(NUMBER, copied)
    file.write_text(text)


def test_another_series_and_none_at_all_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        EngineError, match=r"supports vLLM 0\.32 and 0\.33, found 0\.34\.1: install"
    ):
        contract.check("0.34.1", SOURCES)
    with pytest.raises(EngineError, match="there is no vllm"):
        contract.check(NUMBER, tmp_path)
    monkeypatch.setattr(contract, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match="vLLM is not installed: install a supported version"):
        contract.installed()


class Runner:
    """Some vLLM's."""

    def step(self, output: int, more: int = 0) -> str:
        return f"{output}+{more}"


class Below(Runner):
    def step(self, output: int, more: int = 0) -> str:
        return f"below {output}"


def test_a_wrapped_method_is_wrapped_once_and_below_only_where_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, below = Runner.step, Below.step

    def twice(original: object, self: Runner, output: int, **rest: int) -> object:
        return original(self, 2 * output, **rest)  # type: ignore[operator]

    monkeypatch.setattr(Runner, "step", plain)  # undone afterwards
    monkeypatch.setattr(Below, "step", below)
    step = Hook(f"{__name__}:Runner", "step", "to test", "wrapped")
    for _ in range(3):
        install({"step": twice}, (step,))
    assert Runner().step(4, more=1) == "8+1" and Below().step(4) == "below 4"
    install({"step": twice}, (replace(step, below=True),))
    assert Below().step(4) == "below 8" and Runner().step(1) == "2+0"


@pytest.mark.parametrize("said", ["ture", "2", " 1"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_WORKER_ENABLED", said)
    with pytest.raises(SettingsError, match="neither on nor off: set 1, or unset it"):
        register()
