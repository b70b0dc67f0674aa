"""``hvd policy`` on a real registry: what a person reads, what is moved, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.errors import ModelError, PolicyRefused, RegistryError
from decoder.policy.first import SHIPPED
from decoder.policy.probes import to_bytes
from learner.release.registry import AliasState, Registry
from pipelines.cli import app
from pipelines.demo.run import promote
from pipelines.policy import command
from pipelines.policy.moves import load_policy
from tests.conftest import random_policy
from tests.learner.conftest import copied
from tests.learner.stage import client_of

# mlflow uses parts of sqlalchemy that are to go; that is theirs to mend
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAGE = Path(__file__).parents[3] / "docs" / "mlflow.md"
SCOPE = "0123456789abcdef"
NAME = "hvd-payoff-llama-eagle3-01234567"
LEARNED = {"origin": "learner", "verdict": "faster", "target": "llama", "drafter": "eagle3"}


@pytest.fixture(scope="module")
def promoted(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions; the learner promoted the first, and then the second."""
    registry = copied(empty_store, tmp_path_factory.mktemp("promoted") / "mlruns")
    registry.register(frequency_policy(SCOPE), tags={**LEARNED, "origin": "first"})
    registry.move(SCOPE, "champion", 1, "learner", "the first")
    registry.register(random_policy(1, SCOPE), {"champion": 1}, {"rate_gain": 0.05}, LEARNED)
    registry.move(SCOPE, "champion", 2, "learner", "won")
    registry.register(random_policy(2, SCOPE), tags={"origin": "experiment"})
    return Path(registry.tracking_uri.removeprefix("sqlite:///"))


@pytest.fixture
def held(promoted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A copy of these for a test of its own."""
    registry = copied(promoted, tmp_path / "mlruns")
    monkeypatch.setenv("HVD_LEARNER_MLFLOW_TRACKING_URI", registry.tracking_uri)
    monkeypatch.setenv("LOGNAME", "anna")
    return registry


def hvd(*arguments: str) -> str:
    """What ``hvd policy`` prints; its error is raised."""
    done = CliRunner().invoke(app, ["policy", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def read(*arguments: str) -> Any:
    return json.loads(hvd(*arguments, "--json"))


def test_list_says_what_is_served_and_why(held: Registry) -> None:
    (model,) = read("list")
    assert (model["name"], model["served"]) == (NAME, 2)
    assert [v["aliases"] for v in model["versions"]] == [[], ["champion"], ["candidate"]]
    assert [v["tags"].get("why") for v in model["versions"]] == ["the first", "won", None]
    shown = hvd("list", "--scope", SCOPE[:4])
    assert NAME in shown and "won" in shown


def test_a_terminal_says_what_is_waited_for_and_a_pipe_holds_nothing_of_it(
    held: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal in (True, False):
        shown = io.StringIO()
        monkeypatch.setattr(command, "err", Console(file=shown, force_terminal=is_terminal))
        read("list")
        assert ("asking the registry" in shown.getvalue()) is is_terminal


def test_what_is_promoted_is_rolled_back_as_often_as_it_is_asked_for(held: Registry) -> None:
    with pytest.raises(RegistryError, match="has not passed the gate: give --force"):
        hvd("promote", "3")
    said = hvd("promote", "3", "--force", "--why", "I want to see it")
    assert "champion went from version 2 to version 3" in said
    assert held.alias_state(SCOPE).champion == 3
    assert (read("rollback")["to"], read("rollback")["to"]) == (2, 1)
    with pytest.raises(RegistryError, match="nothing was champion before version 1"):
        hvd("rollback")
    hvd("promote", "2")  # it was champion: no force
    client_of(held).set_registered_model_alias(NAME, "champion", "3")
    assert read("rollback")["to"] == 2, "from a move on MLflow's page"
    moves = [(m.before, m.after, m.by, m.why) for m in held.history(SCOPE)]
    assert moves[:6] == [
        (None, 1, "learner", "the first"),
        (1, 2, "learner", "won"),
        (2, 3, "anna", "I want to see it"),
        (3, 2, "anna", "rollback of version 3"),
        (2, 1, "anna", "rollback of version 2"),
        (1, 2, "anna", "promoted by hand"),
    ]


def test_a_pin_goes_before_the_champion_until_it_ends(held: Registry) -> None:
    assert read("pin", "1", "--why", "safe")["served"] == 1
    with pytest.raises(RegistryError, match="version 1 is pinned"):
        hvd("promote", "2")
    assert read("promote", "2", "--force")["served"] == 1
    assert read("unpin")["served"] == 2
    with pytest.raises(RegistryError, match="has alias pinned"):
        hvd("unpin")
    assert held.alias_state(SCOPE) == AliasState(SCOPE, champion=2)
    assert read("rollback")["to"] == 1, "what was pinned was no champion"


def test_a_file_is_registered_and_promoted_by_force_alone(held: Registry, tmp_path: Path) -> None:
    bundle = tmp_path / "mine.safetensors"
    bundle.write_bytes(to_bytes(random_policy(7, SCOPE)))
    with pytest.raises(RegistryError, match=r"mine.safetensors has not passed the gate"):
        hvd("promote", str(bundle))
    assert read("promote", str(bundle), "--force")["to"] == 4
    version = held.versions(SCOPE)[-1]
    assert version.tags["origin"] == "person" and version.tags["target"] == "llama"
    assert read("promote", str(SHIPPED), "--force")["to"] == 5  # made for any scope
    assert held.load(SCOPE, 5).scope == SCOPE
    bundle.write_bytes(to_bytes(random_policy(7, "another")))
    with pytest.raises(PolicyRefused, match="another"):
        hvd("promote", str(bundle), "--force")
    bundle.write_bytes(to_bytes(random_policy())[:-8])
    with pytest.raises(PolicyRefused, match="cannot be read"):
        hvd("promote", str(bundle), "--force")
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        load_policy(tmp_path / "none.safetensors")
    assert held.alias_state(SCOPE).champion == 5


def test_the_mistake_of_a_demo_is_a_champion_that_drafts_nothing(
    held: Registry, tmp_path: Path
) -> None:
    assert promote(held.tracking_uri, SCOPE, tmp_path) == held.alias_state(SCOPE).served == 4
    policy = held.load(SCOPE, 4)
    assert policy.use_model is False and policy.threshold > 512


def test_an_unusable_version_is_not_promoted_even_by_force(held: Registry) -> None:
    source = Path(held.versions(SCOPE)[2].source.removeprefix("file://"))
    (source / "artifacts" / "policy.safetensors").write_bytes(b"spoilt")
    for move in (("promote", "3", "--force"), ("pin", "3")):
        with pytest.raises(RegistryError, match="version 3 is unusable"):
            hvd(*move)
    assert held.alias_state(SCOPE) == AliasState(SCOPE, champion=2)


def test_before_the_first_policy_it_says_what_brings_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_LEARNER_MLFLOW_TRACKING_URI", registry.tracking_uri)
    assert "send some requests" in CliRunner().invoke(app, ["policy", "list"]).output
    with pytest.raises(RegistryError, match="send some requests"):
        hvd("rollback")


def test_two_scopes_must_be_told_apart(held: Registry) -> None:
    held.register(random_policy(scope="fedcba9876543210"))
    assert len(read("list")) == 2
    with pytest.raises(RegistryError, match="several policies: name one with --scope"):
        hvd("rollback")
    with pytest.raises(RegistryError, match="no policy of scope 77"):
        hvd("list", "--scope", "77")
    with pytest.raises(RegistryError, match="has no version 9: the last ones are 1, 2, 3"):
        hvd("pin", "9", "--scope", SCOPE)
    assert read("pin", "1", "--scope", "hvd-payoff-fedcba9876543210")["served"] == 1


def test_what_mlflow_does_itself_is_done_as_the_page_says(
    held: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text().partition("## Use MLflow directly")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.setenv("MODEL", NAME)
    exec(code)
    said = capsys.readouterr().out
    assert "won" in said and "rate_gain" in said and "moved." in said
    assert held.alias_state(SCOPE) == AliasState(SCOPE, champion=2)
