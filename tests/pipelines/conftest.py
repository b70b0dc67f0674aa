"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines import embedded


@pytest.fixture
def expanded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = embedded.model_directory()
    home.mkdir(parents=True)
    (home / "config.json").write_text("{}")
    return home
