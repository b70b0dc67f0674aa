"""What tests of several files here need."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme


@pytest.fixture
def ca_file(tmp_path: Path) -> Path:
    """The certificate of an authority."""
    file = tmp_path / "ca.crt"
    trustme.CA().cert_pem.write_to_path(str(file))
    return file
