from __future__ import annotations

import pytest

from decoder.contracts.errors import ModelError
from pipelines import embedded


def test_an_expanded_model_is_left_as_it_is(expanded_model) -> None:
    assert embedded.ensure_model() == expanded_model
    assert [p.name for p in expanded_model.parent.iterdir()] == [expanded_model.name]


def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    import sys

    assert embedded.gguf_file().suffix == ".gguf"
    assert embedded.PACKAGE not in sys.modules


def test_a_missing_model_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="make setup"):
        embedded.gguf_file()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot write the model"):
        embedded.ensure_model()
