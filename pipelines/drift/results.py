"""What a study keeps: a JSON line for each part of it, appended when that is done.

A line is known by a digest of all that it depends on (scenario, seed, policy, recordings, code), so
a study that was interrupted goes on, and one whose code has changed begins anew.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from decoder.contracts.errors import SettingsError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Part = TypeVar("Part", bound="DataclassInstance")
ROOT: Final = Path(__file__).parents[2]
CODE: Final = ("decoder", "learner", "pipelines/replay", "pipelines/drift")


class Results(Generic[Part]):
    """A file of a folder, ``runs.jsonl`` for runs, that holds dataclasses of one kind."""

    def __init__(
        self, folder: Path, kind: type[Part], resume: bool = True, name: str = "runs"
    ) -> None:
        """Open the results in ``folder``; without ``resume`` what is there is thrown away.

        Raises:
            SettingsError: what is there is not of this version.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.jsonl"
        if not resume:
            self._path.unlink(missing_ok=True)
        self._parts: dict[str, Part] = {}
        held = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        if held and not held.endswith("\n"):  # cut short by an interrupt
            held = held[: held.rfind("\n") + 1]
            self._path.write_text(held, encoding="utf-8")
        for line in held.splitlines():
            try:
                record = json.loads(line)
                key = record.pop("key")
                self._parts[key] = kind(**record)
            except (ValueError, KeyError, TypeError) as error:
                raise SettingsError(
                    f"{self._path} is not of this version: begin anew with --anew, or elsewhere "
                    "with --out."
                ) from error

    def get(self, key: str) -> Part | None:
        """The part known by ``key``."""
        return self._parts.get(key)

    def put(self, key: str, part: Part) -> None:
        """Keep a part."""
        self._parts[key] = part
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **asdict(part)}) + "\n")


def key_of(*parts: str) -> str:
    """The digest of all that a part depends on, and of the code."""
    return hashlib.sha256("\0".join((_code(), *parts)).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    sha = hashlib.sha256()
    for path in sorted(path for room in CODE for path in (ROOT / room).rglob("*.py")):
        sha.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return sha.hexdigest()
