"""The page on settings is what the classes say; other pages name no setting that is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from decoder.contracts.settings import OF_NO_CLASS, Settings
from tests.contracts.settings_page import CLASSES, OTHERS

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
    } | {*OF_NO_CLASS}


def test_every_class_of_settings_is_on_it() -> None:
    assert {*CLASSES.values()} == {*Settings.__subclasses__()}
    assert {*OF_NO_CLASS} <= {*OTHERS}


@pytest.mark.parametrize("settings", CLASSES.values())
def test_every_setting_says_what_it_is(settings: type[Settings]) -> None:
    assert not [name for name, field in settings.model_fields.items() if not field.description]


@pytest.mark.parametrize("path", NAMING, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_names_a_setting_that_is_not_there(path: Path) -> None:
    for name in re.findall(r"\bHVD_(?:KAFKA|WORKER|LEARNER)_[A-Z0-9_]*[A-Z0-9]", path.read_text()):
        assert name in known() or any(each.startswith(f"{name}_") for each in known()), name
