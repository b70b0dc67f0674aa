"""What tests of several rooms share."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from pipelines import embedded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what kafka-python imports itself, which is theirs to mend
    import kafka  # noqa: F401


@pytest.fixture
def expanded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = embedded.model_directory()
    home.mkdir(parents=True)
    (home / "config.json").write_text("{}")
    return home
