"""What a tenant's pseudonym is a hash of: how a request said whose it is, and what it said.

The middleware makes these texts; whoever looks for a tenant by its name goes through all of them.
"""

from __future__ import annotations

from typing import Final

NAMED: Final = "/named:"


def of_header(value: str) -> str:
    """The caller that a gateway names in the header of ``HVD_WORKER_TENANT_HEADER``."""
    return f"header:{value}"


def of_key(key: str) -> str:
    """The caller with an API key."""
    return f"key:{key}"


def of_authorization(given: str) -> str:
    """The caller by a whole ``Authorization``: of a bearer's key, which is what vLLM checks, or of
    what else stands there."""
    scheme, _, key = given.partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return of_key(key.strip())
    return f"authorization:{given}"


def of_word(caller: str, word: str) -> str:
    """The caller that calls itself ``word``: a part of ``caller``, which is "" for anybody."""
    return f"{caller}{NAMED}{word}"


def spellings(name: str) -> tuple[str, ...]:
    """Every text that a worker may have hashed for the tenant that a person calls ``name``.

    Also ``name`` as it is: so a caller and its word, or one way of several, can be named exactly.
    """
    caller, named, word = name.partition(NAMED)
    heard = _heard(caller) + named + word  # the word comes in the body, as it is
    ways = (of_header(heard), of_key(heard), of_authorization(heard), of_word("", name))
    return tuple(dict.fromkeys((name, heard, *ways)))


def _heard(name: str) -> str:
    """``name`` as it comes out of a header, whose bytes count as Latin-1 (ASGI leaves it open)."""
    return name.encode(errors="surrogateescape").decode("latin-1").strip()
