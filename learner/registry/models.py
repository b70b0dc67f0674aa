"""Which registered model is a scope's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from decoder.contracts.errors import RegistryError
from learner.registry import runs
from learner.registry.connection import Connection
from learner.registry.standing import SCOPE_TAG

PAGE: Final = 100
DIGITS: Final = 8
"""Of a scope, in a name that says target and drafter as well."""
LONGEST: Final = 64


class Models:
    """Registered models whose names begin with ``prefix``.

    A model is a scope's, as its tag ``scope`` says. It is called ``prefix``, target, drafter and
    the scope's first digits; or ``prefix`` and the scope, as all were once, where workers do not
    say what they serve.
    """

    def __init__(self, connection: Connection, prefix: str) -> None:
        self.prefix = prefix
        self._connection = connection

    def all(self) -> Iterator[Any]:
        """Every one, page by page."""
        return self._asked(f"name LIKE '{self.prefix}%'")

    def named(self, scope: str) -> str | None:
        """The name of the scope's model, or None where there is none."""
        names = self._connection.models
        if scope not in names:
            tagged = self._asked(f"name LIKE '{self.prefix}%' and tags.{SCOPE_TAG} = '{scope}'")
            of_old = self._asked(f"name = '{self.prefix}{scope}'")
            model = next(tagged, None) or next(of_old, None)
            if model is None:
                return None
            names[scope] = model.name
        return names[scope]

    def known(self, scope: str) -> str:
        """As :meth:`named`, of a scope that has a model.

        Raises:
            RegistryError: it has none.
        """
        name = self.named(scope)
        if name is None:
            raise RegistryError(f"the registry has no model of scope {scope}")
        return name

    def ensured(self, scope: str, tags: Mapping[str, str]) -> str:
        """As :meth:`named`; it is made where there is none, and called after ``tags``."""
        name = self.named(scope)
        if name is None:
            name = self.name_for(scope, tags)
            served = {key: tags[key] for key in ("target", "drafter") if key in tags}
            self._connection.client.create_registered_model(
                name, {SCOPE_TAG: scope, **served}, runs.model_description(scope, served)
            )
            self._connection.models[scope] = name
        return name

    def name_for(self, scope: str, tags: Mapping[str, str]) -> str:
        """What a new model of ``scope`` is to be called."""
        if not tags.get("target"):
            return self.prefix + scope
        served = f"{_plain(tags['target'])}-{_plain(tags.get('drafter', '')) or 'no-drafter'}"
        name = f"{self.prefix}{served}-{scope[:DIGITS]}"
        taken = next(self._asked(f"name = '{name}'"), None)
        return name if taken is None else f"{self.prefix}{served}-{scope}"

    def versions(self, name: str) -> Iterator[Any]:
        """The versions of a model, page by page."""
        return self._pages(self._connection.client.search_model_versions, f"name = '{name}'")

    def _asked(self, filter_string: str) -> Iterator[Any]:
        found = self._pages(self._connection.client.search_registered_models, filter_string)
        return (m for m in found if m.name.startswith(self.prefix))  # "_" is any letter to LIKE

    @staticmethod
    def _pages(search: Any, filter_string: str) -> Iterator[Any]:
        token = None
        while True:
            page = search(filter_string, max_results=PAGE, page_token=token)
            yield from page
            token = page.token
            if not token:
                return


def _plain(name: str) -> str:
    """``name`` as part of a model's: what a URL and a shell leave as it is."""
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-.")[:LONGEST]
