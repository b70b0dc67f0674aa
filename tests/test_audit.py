"""What is known to be vulnerable fails ``make check``; what nobody could be asked about is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "requirements" / "audit.py"
GOOD: dict[str, Any] = {"name": "good", "version": "1", "vulns": []}
BAD = {
    "name": "bad",
    "version": "2",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": [], "description": ""}],
}
UNKNOWN = {"name": "odd", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("told", "status", "said"),
    [
        ([GOOD], 0, "1 packages audited, 0 with"),
        ([GOOD, BAD], 1, "bad 2: PYSEC-1, mended in 3."),
        ([BAD, UNKNOWN], 1, "unknown to the service: odd."),
        ([UNKNOWN], 0, "for any package: they are not audited"),
        (None, 0, "the packages are not audited"),
    ],
)
def test_a_finding_fails_and_no_answer_is_said(told: Any, status: int, said: str) -> None:
    text = "" if told is None else json.dumps({"dependencies": told, "fixes": []})
    found = subprocess.run(
        [sys.executable, str(SCRIPT)], input=text, text=True, capture_output=True, check=False
    )
    assert found.returncode == status and said in found.stdout, found
