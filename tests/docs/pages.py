"""Markdown as the tests of pages need it: pages, links, anchors, blocks, tables."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
DATA: Final = DOCS / "data" / "performance.json"
PAGES: Final = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md"), *ROOT.glob("deploy/**/*.md")]
)
FENCE: Final = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MARK: Final = re.compile(r"<!-- (\w+): ([^>]+?) -->\n\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``mark`` is the comment on the line before it, such as ``needs: a GPU``."""

    language: str
    code: str
    mark: str


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for found in FENCE.finditer(text):
        mark = MARK.search(text[: found.start()])
        code = textwrap.dedent(found.group(3))
        yield Block(found.group(2), code, f"{mark.group(1)}: {mark.group(2)}" if mark else "")


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def links(text: str) -> list[str]:
    """What a page points to."""
    return LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        again = sum(each == name or each.startswith(f"{name}-") for each in found)
        found.add(f"{name}-{again}" if name in found else name)
    return found


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    head, *body = (
        f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|\n"
        for line in [columns, *rows]
    )
    return "".join([head, f"|{'---|' * len(columns)}\n", *body])


def data() -> Mapping[str, Any]:
    """The tables that the page on performance shows, by name."""
    read: Mapping[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return read


def filled(text: str) -> str:
    """``text`` with the table of the data behind each ``<!-- data: NAME -->``."""
    shown = data()

    def of(found: re.Match[str]) -> str:
        given = shown[found.group(1)]
        return f"<!-- data: {found.group(1)} -->\n\n{table(given['columns'], given['rows'])}\n"

    return re.sub(r"<!-- data: (\w+) -->\n\n(?:(?:\|.*\n)+\n)?", of, text)
