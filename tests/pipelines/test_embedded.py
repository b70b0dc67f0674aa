from __future__ import annotations

import pytest

from decoder.contracts.errors import ModelError
from pipelines import embedded


def test_an_expanded_model_is_left_as_it_is(expanded_model) -> None:
    assert embedded.ensure_model() == expanded_model
    assert [p.name for p in expanded_model.parent.iterdir()] == [expanded_model.name]


def test_a_missing_model_package_and_a_cache_that_cannot_be_written_are_named(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot write the model"):
        embedded.ensure_model()
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="make setup"):
        embedded.gguf_file()
