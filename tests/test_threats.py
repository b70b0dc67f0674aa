"""Each claim of the page on security names a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_claim_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    tables = re.findall(r"\| claim \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", text)
    claims = "".join(tables).splitlines()
    assert len(claims) > 15
    for claim in claims:
        named = NAMED.findall(claim)
        assert named, claim
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name
