"""The texts that tenant pseudonyms are hashed from: how a request named its tenant, and the name.

The middleware builds these texts. To find a tenant by name, search all its spellings.
"""

from __future__ import annotations

from typing import Final

NAMED: Final = "/named:"


def of_header(value: str) -> str:
    """The caller named by a gateway in the header ``HVD_WORKER_TENANT_HEADER``."""
    return f"header:{value}"


def of_key(key: str) -> str:
    """The caller with an API key."""
    return f"key:{key}"


def of_authorization(given: str) -> str:
    """The caller of an ``Authorization`` header: its bearer key, as vLLM checks it, or the whole
    value."""
    scheme, _, key = given.partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return of_key(key.strip())
    return f"authorization:{given}"


def of_claim(caller: str, claim: str) -> str:
    """A tenant that a client claims within ``caller``, which is "" for an unknown caller."""
    return f"{caller}{NAMED}{claim}"


def spellings(name: str) -> tuple[str, ...]:
    """Every text that a worker may have hashed for the tenant called ``name``.

    ``name`` itself is included, so that a caller with its claim, or one source of several, can be
    given exactly.
    """
    caller, separator, claim = name.partition(NAMED)
    decoded = _from_header(caller) + separator + claim  # a claim is part of the body: unchanged
    sources = of_header(decoded), of_key(decoded), of_authorization(decoded), of_claim("", name)
    return tuple(dict.fromkeys((name, decoded, *sources)))


def _from_header(name: str) -> str:
    """``name`` as decoded from a header; ASGI leaves the encoding open, and Latin-1 is used."""
    return name.encode(errors="surrogateescape").decode("latin-1").strip()
