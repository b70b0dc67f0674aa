"""Scenarios: what traffic there is, and how it changes. Files, one scenario each.

A scenario is a sequence of segments. What differs between a segment and the one before it is the
change that the policies meet; ``history`` is the traffic that those trained beforehand knew.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decoder.contracts.errors import SettingsError
from decoder.policy.pricing import MAX_TOKENS, CostTable

SHIPPED: Final = Path(__file__).parent / "scenarios"
PLAIN_US: Final = 20_000.0
"""A step of one token on the machine that scenarios begin on."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Drafter(_Part):
    """Chances that the model drafter foresees a token, drawn anew for each.

    ``known`` holds where the text has continued so before, ``new`` elsewhere.
    """

    known: float = Field(default=0.84, ge=0, le=1)
    new: float = Field(default=0.74, ge=0, le=1)


class Machine(_Part):
    """What steps cost, in steps of one token on the machine that scenarios begin on.

    A token that is verified costs ``token``; the drafter takes ``draft`` each time it runs and
    ``draft_token`` for each token it makes.
    """

    plain: float = Field(default=1.0, gt=0)
    token: float = Field(default=0.006, ge=0)
    draft: float = Field(default=0.02, ge=0)
    draft_token: float = Field(default=0.03, ge=0)

    @property
    def costs(self) -> CostTable:
        """The same in microseconds."""
        last = self.plain + self.token * (MAX_TOKENS - 1)
        return CostTable(
            "scenario",
            (1, MAX_TOKENS),
            (PLAIN_US * self.plain, PLAIN_US * last),
            draft_us=PLAIN_US * self.draft,
            draft_token_us=PLAIN_US * self.draft_token,
        )


class Segment(_Part):
    """A stretch of traffic that stays the same.

    ``kinds`` are kinds of text (``kinds.toml``) or trace files by their stems. Without ``drafter``
    recordings keep the model arm they were made with; those that have none take the usual one.
    """

    kinds: tuple[str, ...] = Field(min_length=1)
    generations: int = Field(ge=1, le=100_000)
    machine: Machine = Machine()
    drafter: Drafter | None = None
    templates: int = Field(
        default=0, ge=0, description="generations repeated with changed arguments"
    )
    breaks: int = Field(
        default=0, ge=0, description="prompts hold the output, every so many tokens of it wrong"
    )

    def changes_from(self, before: Segment) -> list[str]:
        """Names of what differs."""
        return [
            name
            for name in type(self).model_fields
            if name != "generations" and getattr(self, name) != getattr(before, name)
        ]


class Scenario(_Part):
    """Segments, one after another. ``history`` is the first of them if not given.

    ``factor`` stands in for the worker's ``suffix_max_factor``, with which history was made.
    """

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    about: str = ""
    segments: tuple[Segment, ...] = Field(min_length=1)
    history: Segment | None = None
    factor: float | None = Field(default=None, gt=0)

    @property
    def known(self) -> Segment:
        """What a policy trained beforehand was trained on."""
        return self.history or self.segments[0]

    def changes(self, index: int) -> list[str]:
        """What changes where a segment begins; for the first of them, against ``history``."""
        if index:
            return self.segments[index].changes_from(self.segments[index - 1])
        found = self.segments[0].changes_from(self.known)
        return [*found, "factor"] if self.factor else found

    @property
    def later(self) -> tuple[Segment, ...]:
        """What comes after the first change, each kind of segment once; all, if nothing does."""
        found: list[Segment] = []
        for segment in self.segments[1:] or self.segments:
            if all(segment.changes_from(other) for other in found):
                found.append(segment)
        return tuple(found)


def chosen(names: Sequence[str]) -> list[Scenario]:
    """The scenarios called ``names``, shipped ones or files; all that ship if there are none.

    Raises:
        SettingsError: there is no such scenario, or its file is not one.
    """
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}
    for name in names:
        if name not in shipped and not name.endswith(".toml"):
            known = ", ".join(shipped)
            raise SettingsError(f"no scenario {name!r}: give a .toml file, or one of {known}.")
    return [read(shipped.get(name, Path(name))) for name in names or shipped]


def read(path: Path) -> Scenario:
    """The scenario in ``path``.

    Raises:
        SettingsError: it cannot be read, or is not a scenario; says where and why.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        return Scenario.model_validate({"name": path.stem, **found})
    except OSError as error:
        raise SettingsError(f"cannot read scenario {path}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"scenario {path} is not TOML: {error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise SettingsError(f"scenario {path}: {where}: {first['msg']}.") from error
