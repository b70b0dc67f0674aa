"""The folder of schemas as it is published: what the code says now, and what the last release said.

An id of features stays where it is when the code has another list: events of before name it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import ContractError
from pipelines.telemetry.additive import breaks
from pipelines.telemetry.asyncapi import description
from pipelines.telemetry.schemas import PAGE, schemas, written

RELEASED: Final = "released"


def files() -> dict[str, str]:
    """Text by name of file.

    Raises:
        ContractError: this is no checkout, which has the page that says what columns mean.
    """
    if not PAGE.is_file():
        raise ContractError(f"schemas are made in a checkout: there is no {PAGE}.")
    made = {f"{n}.json": written(s) for n, s in schemas(PAGE.read_text(encoding="utf-8")).items()}
    return {**made, "asyncapi.json": written(description())}


def broken(folder: Path, now: dict[str, str]) -> list[str]:
    """Where ``now`` does more than add to what was released under ``folder``, a sentence each."""
    found = []
    for path in sorted((folder / RELEASED).glob("*.json")):
        before, text = _read(path.read_text(encoding="utf-8")), now.get(path.name)
        if text is None and (folder / path.name).is_file():
            text = (folder / path.name).read_text(encoding="utf-8")  # of features of before
        if text is None:
            found.append(f"{path.name}: nothing keeps it any more")
        else:
            found += [f"{path.name}: {what}" for what in breaks(before, _read(text))]
    return found


def publish(folder: Path, release: bool = False) -> list[Path]:
    """Write the files into ``folder``, of a ``release`` also as what later ones may only add to.

    Raises:
        ContractError: something was changed that is no addition; nothing is written.
    """
    made = files()
    found = broken(folder, made)
    if found:
        raise ContractError("no addition, so a new version of the topic: " + "; ".join(found))
    paths = []
    for part in (folder, folder / RELEASED) if release else (folder,):
        part.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            if part.name != RELEASED or name != "asyncapi.json":
                (part / name).write_text(text, encoding="utf-8")
                paths.append(part / name)
    return paths


def _read(text: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(text)
    return schema
