"""What a worker serves from its first request on, whatever became of the file that ships."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from decoder.admission import check_size
from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.errors import PolicyRefused
from decoder.policy import first
from decoder.policy.first import first_policy, read_first
from decoder.policy.probes import to_bytes
from decoder.settings import WorkerSettings
from decoder.worker import initial_policy
from pipelines.lab.first.make import ALLOWED
from tests.conftest import random_policy


def general(scope: str = ANY_SCOPE, role: str = "first") -> Policy:
    return replace(random_policy(scope=scope), role=role)


def test_the_one_that_ships_is_sound_quick_and_small() -> None:
    policy = first_policy("scope")
    assert (policy.scope, policy.role, policy.kind) == ("scope", "first", "survival")
    assert (policy.version, policy.publication) == (0, 0)
    assert first_policy("other").layers is policy.layers, "it is read once"
    check_size(policy)
    assert first.SHIPPED.stat().st_size < 300_000
    sets = policy.provenance["sets"]
    assert len(sets) >= 8 and all(s["licence"] in ALLOWED for s in sets)
    assert policy.provenance["drafts_trained_on"] == sum(s["drafts"] for s in sets)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "missing"),
        (b"", "malformed"),
        (to_bytes(general())[:-9], "malformed"),
        (to_bytes(general("scope")), "scope"),
        (to_bytes(general(role="champion")), "scope"),
    ],
)
def test_a_worker_counts_where_the_file_is_unusable_and_says_so_once(
    data: bytes | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "first.safetensors"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(PolicyRefused) as refused:
        read_first(path)
    assert refused.value.reason == reason
    monkeypatch.setattr(first, "SHIPPED", path)
    first._warn_once.cache_clear()
    policy = initial_policy(WorkerSettings(), "scope")
    assert initial_policy(WorkerSettings(), "other").scope == "other"
    assert (policy.kind, policy.scope, policy.role) == ("frequency", "scope", "first")
    assert len(caplog.records) == 1 and "counted score" in caplog.text


def test_a_person_s_own_file_goes_first_and_may_be_for_any_scope(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(to_bytes(replace(general(), threshold=3.25)))
    policy = initial_policy(WorkerSettings(policy_file=path), "scope")
    assert (policy.threshold, policy.scope) == (3.25, "scope")
    path.write_bytes(to_bytes(random_policy(scope="elsewhere")))
    with pytest.raises(PolicyRefused):
        initial_policy(WorkerSettings(policy_file=path), "scope")


def test_its_page_tells_of_every_set_it_was_made_of() -> None:
    page = (Path(__file__).parents[2] / "docs" / "learning.md").read_text()
    for s in first_policy("scope").provenance["sets"]:
        row = (s["name"], s["licence"], s["sessions"], s["generations"], f"{s['drafts']:,}")
        assert "| " + " | ".join(map(str, row)) + " |" in page
