"""The plugin loads on the vLLM it was made for, and says what differs on any other."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from decoder.contracts.errors import EngineError, SettingsError
from decoder.engines.vllm.hooks import HOOKS, RUNNER, Hook, check, install
from decoder.engines.vllm.plugin import AROUND, register

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports

HERE = __name__


class Runner:
    """Some other vLLM's."""

    def step(self, output: int, more: int = 0, *, late: bool = False) -> str:
        return f"{output}+{more}"

    def changed(self, output: int, new: int) -> None:
        self.step(output + new)


class Below(Runner):
    def step(self, output: int, more: int = 0, *, late: bool = False) -> str:
        return f"below {output}"


@dataclass
class Output:
    kept: int = 0


STEP = Hook(f"{HERE}:Runner", "step", "output, more=, *, late=", "to test")


def test_this_vllm_has_all_that_is_touched() -> None:
    check()
    assert {h.name for h in HOOKS if h.wrapped} == {"load_model", *AROUND}
    assert all(hook.why for hook in HOOKS)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda h: f"{h.owner}.{h.name}")
def test_each_hook_is_missed_where_it_differs(hook: Hook) -> None:
    with pytest.raises(EngineError, match="not the one the plugin was made for"):
        check((replace(hook, expects=hook.expects + ", something_else"),))
    with pytest.raises(EngineError, match="there is no"):
        check((replace(hook, owner=hook.owner + "V3"),))


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (
            Hook(f"{HERE}:Runner", "changed", "output", "to test"),
            "Runner.changed takes (output, new) where (output) was expected",
        ),
        (Hook(f"{HERE}:Runner", "gone", "", "to test"), "Runner has no gone"),
        (Hook(f"{HERE}:Output", "", "kept, lost", "to test", False), "Output has no lost"),
        (Hook("tests.engines.not_there:Runner", "x", "", "to test"), "there is no tests.engines."),
    ],
)
def test_a_difference_is_told_in_one_sentence(hook: Hook, says: str) -> None:
    with pytest.raises(EngineError) as refusal:
        check((STEP, hook))
    told = str(refusal.value)
    assert says in told and told.endswith("or unset HVD_WORKER_ENABLED.")
    assert told.count(". ") == 0


def test_a_wrapped_method_is_wrapped_once_and_below_only_where_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, below = Runner.step, Below.step

    def twice(original: object, self: Runner, output: int, **rest: int) -> object:
        return original(self, 2 * output, **rest)  # type: ignore[operator]

    monkeypatch.setattr(Runner, "step", plain)  # undone afterwards
    monkeypatch.setattr(Below, "step", below)
    for _ in range(3):
        install({"step": twice}, (STEP,))
    assert Runner().step(4, more=1) == "8+1" and Below().step(4) == "below 4"
    install({"step": twice}, (replace(STEP, below=True),))
    assert Below().step(4) == "below 8" and Runner().step(1) == "2+0"


@pytest.mark.parametrize("said", ["ture", "2", " 1"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_WORKER_ENABLED", said)
    with pytest.raises(SettingsError, match="neither on nor off: set 1, or unset it"):
        register()


def test_another_vllm_ends_loading_before_anything_is_wrapped() -> None:
    """In a process of its own, as vLLM loads a plugin."""
    module, name = RUNNER.split(":")
    code = (
        f"from {module} import {name} as R\n"
        "del R.execute_model\n"
        "from decoder.engines.vllm.plugin import register\n"
        "try: register()\n"
        "except Exception as e: print(type(e).__name__, e)\n"
        "print(hasattr(R.propose_draft_token_ids, '_hvd_wrapped'))\n"
    )
    environment = {"HVD_WORKER_ENABLED": "1", "PATH": "", "PYTHONPATH": sys.path[0] or "."}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "GPUModelRunner has no execute_model" in run.stdout
    assert run.stdout.strip().endswith("False")
