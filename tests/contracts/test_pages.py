"""What the pages on telemetry, topics and settings tell is what there is; their code runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from decoder.contracts.errors import EventRefused, PolicyRefused
from decoder.contracts.features import FEATURES
from decoder.contracts.identity import Pseudonyms
from decoder.contracts.settings import GLOBAL_VARIABLES, Settings
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import TOPICS
from decoder.contracts.trials import Block, Group, Round
from learner.ingest.dead_letters import headers_of
from learner.ingest.source import Fetched
from learner.lease import Claim
from tests.docs.reference import CLASSES, OTHERS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "topics.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "telemetry.md").read_text(), re.DOTALL)


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def cells(text: str) -> list[list[str]]:
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_pseudonyms_are_ours() -> None:
    (block,) = (b for b in BLOCKS if "def pseudonym(" in b)
    found: dict[str, Any] = {}
    exec(block, found)
    assert found["pseudonym"](b"key", "tenant", "blue") == Pseudonyms(b"key").of("tenant", "blue")


def test_every_feature_topic_and_field_of_a_status_is_listed() -> None:
    listed = [name for row in cells(section("Features")) for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(FEATURES)
    topics = {row[0].strip("`"): row[1] for row in cells(PAGE.split("\n## ")[0])}
    assert topics == {topic.name: topic.key for topic in TOPICS}
    told = set(re.findall(r"`(\w+)`", section("A status record")))
    assert {*WorkerStatus.model_fields, *LearnerStatus.model_fields} - told <= {"contract"}


def test_every_field_of_a_round_a_lease_and_a_dead_letter_is_listed() -> None:
    headers = [name for name, _ in headers_of(Fetched(0, 0, 0, None, b""), EventRefused(""))]
    rounds = {name for model in (Round, Block, Group) for name in model.model_fields}
    for title, names in {
        "A round of `hvd.trials.v2`": rounds, "A dead letter": set(headers),
        "A lease": {field.name for field in fields(Claim)},
    }.items():  # fmt: skip
        assert names and names <= set(re.findall(r"`([\w.]+)`", section(title))), title


def test_every_reason_of_a_refusal_is_listed() -> None:
    told = {
        name for row in cells(section("A policy record")) for name in re.findall(r"`(\w+)`", row[0])
    }
    assert PolicyRefused.__doc__ is not None
    assert told == set(re.findall(r"``(\w+)``", PolicyRefused.__doc__.split("one of")[1]))


ROOT = Path(__file__).parents[2]
NAMING = sorted(
    path
    for pattern in ("README.md", "docs/**/*.md", "deploy/**/*.md", "deploy/**/*.y*ml")
    for path in ROOT.glob(pattern)
)


def known() -> set[str]:
    return {
        f"{settings.model_config.get('env_prefix')}{name.upper()}"
        for settings in CLASSES.values()
        for name in settings.model_fields
    } | {*GLOBAL_VARIABLES}


def test_every_class_of_settings_is_on_it() -> None:
    assert {*CLASSES.values()} == {*Settings.__subclasses__()}
    assert {*GLOBAL_VARIABLES} <= {*OTHERS}


@pytest.mark.parametrize("settings", CLASSES.values())
def test_every_setting_says_what_it_is(settings: type[Settings]) -> None:
    assert not [name for name, field in settings.model_fields.items() if not field.description]


@pytest.mark.parametrize("path", NAMING, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_names_a_setting_that_is_not_there(path: Path) -> None:
    for name in re.findall(r"\bHVD_(?:KAFKA|WORKER|LEARNER)_[A-Z0-9_]*[A-Z0-9]", path.read_text()):
        assert name in known() or any(each.startswith(f"{name}_") for each in known()), name
