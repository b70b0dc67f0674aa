"""What is shown while parts start, and what the set-up prepares for their first start."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pipelines import machine
from pipelines.stack import prepare
from pipelines.stack.running import EXPECTED_S, Starts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(machine, "cache_directory", lambda: tmp_path)
    return tmp_path / "starts.json"


def test_each_part_says_what_is_expected_of_its_start_and_is_timed_for_the_next(cache) -> None:
    shown = io.StringIO()
    first = Starts(Console(file=shown))
    assert set(first.seconds) == set(EXPECTED_S) and not cache.exists()
    first.seconds["worker"] = 222.0
    with first.starting("worker", "worker and learner") as tick:
        tick()
    lines = shown.getvalue().splitlines()
    assert lines[0].strip() == "starting worker and learner, about 222 s", "at once, and not after"
    assert lines[-1].split()[0] == "ready"
    assert json.loads(cache.read_text())["worker"] == Starts(Console(file=shown)).seconds["worker"]
    assert Starts(Console(file=shown)).seconds["worker"] < 222.0


def test_a_start_that_fails_teaches_nothing(cache) -> None:
    starts = Starts(Console(file=io.StringIO()))
    with pytest.raises(KeyboardInterrupt), starts.starting("worker", "worker"):
        raise KeyboardInterrupt
    assert not cache.exists()


@pytest.mark.parametrize("held", ["", "[]", '{"worker": "soon"}', '{"worker": null}'])
def test_a_damaged_record_is_as_good_as_none(cache, held: str) -> None:
    cache.write_text(held)
    assert Starts(Console(file=io.StringIO())).seconds.keys() == EXPECTED_S.keys()


def test_a_record_that_cannot_be_written_stops_no_start(cache) -> None:
    cache.mkdir()
    with Starts(Console(file=io.StringIO())).starting("broker", "broker"):
        pass


def test_what_cannot_be_prepared_is_a_sentence_and_the_rest_is_prepared(
    expanded_model, tmp_path, monkeypatch
) -> None:
    done = tmp_path / "done"
    monkeypatch.setattr(prepare, "VLLM", "raise OSError('no room left')")
    monkeypatch.setattr(prepare, "SERVICES", f"open({str(done)!r}, 'w')")
    assert prepare.prepare() == ["vLLM could not be prepared: OSError: no room left"]
    assert done.exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_byte_code_compiled_loops_and_vllms_look_at_the_models_are_there_before_the_first_start(
    expanded_model, tmp_path, monkeypatch
) -> None:
    for variable in ("PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # as in many an image
    config = json.dumps({"architectures": ["LlamaForCausalLM"]})
    (expanded_model / "config.json").write_text(config)
    assert prepare.prepare() == []
    kept = {path.suffix for path in tmp_path.rglob("*")}
    assert {".pyc", ".nbc"} <= kept
    models = [path.name for path in (tmp_path / "VLLM_CACHE_ROOT" / "modelinfos").iterdir()]
    assert len(models) == 2 and all("llama" in name for name in models)
