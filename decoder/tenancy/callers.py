"""The texts that tenant pseudonyms are hashed from: how a request named its tenant, and the name.

The middleware builds these texts. To find a tenant by name, search all its spellings.
"""

from __future__ import annotations

from typing import Final

HEADER: Final = "header:"
"""Before the name that a gateway gave in the header ``HVD_WORKER_TENANT_HEADER``."""
KEY: Final = "key:"
"""Before an API key."""
NAMED: Final = "/named:"
"""Between a caller, which is "" if unknown, and the tenant that it claims."""


def of_authorization(given: str) -> str:
    """The caller of an ``Authorization`` header: its bearer key, as vLLM checks it, or the whole
    value."""
    scheme, _, key = given.partition(" ")
    bearer = scheme.lower() == "bearer" and key.strip()
    return f"{KEY}{key.strip()}" if bearer else f"authorization:{given}"


def spellings(name: str) -> tuple[str, ...]:
    """Every text that a worker may have hashed for the tenant called ``name``.

    ``name`` itself is included, so that a caller with its claim, or one source of several, can be
    given exactly.
    """
    caller, separator, claim = name.partition(NAMED)
    # ASGI leaves the encoding of headers open: they are read as Latin-1. A claim is in the body.
    latin = caller.encode(errors="surrogateescape").decode("latin-1").strip() + separator + claim
    sources = f"{HEADER}{latin}", f"{KEY}{latin}", of_authorization(latin), f"{NAMED}{name}"
    return tuple(dict.fromkeys((name, latin, *sources)))
