"""What the project says of its packages: extras in pyproject.toml, pins in the lock files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def asked(*extras: str) -> set[Requirement]:
    """Requirements of an installation with these extras; extras of ours within them are opened."""
    told = [*PROJECT["dependencies"]]
    for extra in extras:
        told += PROJECT["optional-dependencies"][extra]
    found: set[Requirement] = set()
    for requirement in map(Requirement, told):
        if requirement.name == PROJECT["name"]:
            found |= asked(*requirement.extras)
        else:
            found.add(requirement)
    return found


def names(requirements: Iterable[Requirement]) -> set[str]:
    return {canonicalize_name(each.name) for each in requirements}


def taken(requirements: Iterable[Requirement]) -> set[str]:
    """Names of all packages that these take, by the metadata of those that are installed here."""
    waiting, seen, found = (
        [(each.name, frozenset(each.extras)) for each in requirements],
        set(),
        set(),
    )
    while waiting:
        name, extras = waiting.pop()
        found.add(canonicalize_name(name))
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:  # what a lock leaves out; the tests name it
            continue
        for each in map(Requirement, needed):
            if each.marker is None or any(
                each.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                waiting.append((each.name, frozenset(each.extras)))
    return found


def locked(name: str) -> dict[str, str]:
    """Version by package."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pins}
