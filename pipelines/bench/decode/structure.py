"""How a prompt is built: the signals of the paper's Figure 2(a), by plain counting.

The paper names the signals (repeated entities, file paths, delimiters, code, schema-like and tool
formats, extended context, recurring evidence) and not how it counted them; these definitions are
the project's own. Counts are per 1000 characters, shares in 0..1.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

PATTERNS: Final = {
    "file_paths": re.compile(
        r"(?<![\w/])(?:[\w.-]+/)+[\w.-]+|\b[\w-]+\.(?:py|js|ts|md|json|c|h)\b"
    ),
    "delimiters": re.compile(r"[{}\[\]()<>|;:`\"]"),
    "code": re.compile(
        r"^\s*(?:def|class|import|from|return|if|for|while|try|with|function|const|let)\b.*[:;({]?$"
        r"|\b\w+\([^()\n]*\)",
        re.MULTILINE,
    ),
    "schema": re.compile(
        r"\"\w+\"\s*:|CREATE TABLE|PRIMARY KEY|FOREIGN KEY|`\w+`|^\s*[-*]\s|^\|.*\|$", re.MULTILINE
    ),
    "tools": re.compile(r"\b(?:functions?|tools?|parameters?|arguments?|commands?|api)\b", re.I),
}
ENTITY: Final = re.compile(r"\b(?:[A-Z][a-z]+(?:\s[A-Z][a-z]+)*|\w*[a-z][A-Z]\w*|\w+_\w+)\b")
WORDS: Final = 6
"""Length in words of a run that counts as recurring evidence when it comes twice."""

SIGNALS: Final = {
    "repeated_entities": "repeated entities",
    "file_paths": "file paths",
    "delimiters": "delimiters",
    "code": "code",
    "schema": "schema-like",
    "tools": "tool words",
    "recurring": "recurring text",
    "kilochars": "length (1000 chars)",
}
"""Names and printed names, in the order of the figure."""


def structure(text: str) -> dict[str, float]:
    """The signals of ``text``; all 0 for an empty one."""
    thousands = len(text) / 1000
    if not thousands:
        return dict.fromkeys(SIGNALS, 0.0)
    entities = Counter(ENTITY.findall(text))
    repeated = sum(n for n in entities.values() if n > 1)
    counts = {name: len(pattern.findall(text)) for name, pattern in PATTERNS.items()}
    return {
        "repeated_entities": repeated / thousands,
        **{name: n / thousands for name, n in counts.items()},
        "recurring": recurring_share(text),
        "kilochars": thousands,
    }


def recurring_share(text: str) -> float:
    """Share of the ``WORDS``-word runs of ``text`` that occur more than once in it."""
    words = text.split()
    runs = Counter(tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1))
    return sum(n for n in runs.values() if n > 1) / max(1, sum(runs.values()))
