"""Identities of requests: sealed in the API process, verified in the engine.

An identity travels in ``vllm_xargs``, which reach the engine as a request's ``extra_args``::

    hvd_tenant, hvd_salt, hvd_session, hvd_request    pseudonyms, or ""
    hvd_seal                                          HMAC of these four under the operator's key

Only sealed identities count. A route that the middleware cannot rewrite, such as one that a later
vLLM adds, therefore passes on no client's claim: its requests share nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from decoder.contracts.identity import Pseudonyms
from decoder.settings import WorkerSettings
from decoder.tenancy.key import VARIABLE, key_of
from decoder.tenancy.shares import ALONE, cache_key

log = logging.getLogger(__name__)

NAMES: Final = ("hvd_tenant", "hvd_salt", "hvd_session", "hvd_request")
SEAL: Final = "hvd_seal"
SEAL_DIGITS: Final = 32

Source = Literal["middleware", "client", "shared"]

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


@dataclass(frozen=True, slots=True)
class Identity:
    """Pseudonyms of a request's tenant, salt, session and id; "" where there is none.

    ``alone``: the tenant is unknown, so the request shares nothing. ``workload`` is the kind of
    traffic for telemetry, which any client may set.
    """

    tenant: str
    salt: str
    session: str
    request: str
    workload: str = ""
    alone: bool = False

    @property
    def key(self) -> str:
        """The cache key: requests with the same key may draft from each other's text."""
        return ALONE if self.alone else cache_key(self.tenant, self.salt)


class Identities:
    """Creates, seals and verifies identities under one key; ``refused`` counts invalid seals."""

    def __init__(self, key: bytes | None, source: Source) -> None:
        """With ``key`` None a random key is used: then only this object's own seals are valid."""
        key = key or secrets.token_bytes(32)
        self._names = Pseudonyms(key)
        self._key = key
        self._source: Source = source
        self.refused = 0

    @classmethod
    def load(cls, settings: WorkerSettings) -> Identities:
        """The identities of a worker; raises as :func:`decoder.tenancy.key.key_of`."""
        return cls(key_of(settings), settings.tenants)

    def make(self, caller: str, salt: str, session: str, request: str, claim: str = "") -> Identity:
        """The identity of a request of ``caller``, as named by the API key or the gateway, or "".
        A client's ``claim`` of a tenant is ignored unless the settings trust clients."""
        if claim and self._source == "client":
            caller = f"{caller}{NAMED}{claim}"
        tenant = self._names.of("tenant", caller)
        return Identity(
            tenant,
            self._names.of("salt", salt),
            self._names.of("session", f"{tenant}/{session}") if session else "",
            self._names.of("request", request),
        )

    def sealed(self, identity: Identity) -> dict[str, str]:
        """The sealed keys to write into a request."""
        names = (identity.tenant, identity.salt, identity.session, identity.request)
        return {**dict(zip(NAMES, names, strict=True)), SEAL: self._seal(names)}

    def of(self, extra_args: Mapping[str, Any] | None, name: str) -> Identity:
        """The identity of a request with ``extra_args``; never raises. ``name`` is the engine's id
        of the request, used where the middleware gave none."""
        extra = extra_args or {}
        workload = self._names.workload(str(extra.get("hvd_workload", "")))
        if SEAL in extra:
            tenant, salt, session, request = (str(extra.get(key, "")) for key in NAMES)
            names = (tenant, salt, session, request)
            seal = str(extra[SEAL]).encode(errors="replace")
            if hmac.compare_digest(seal, self._seal(names).encode()):
                return Identity(*names, workload)
            self._refuse()
        claim, salt, session = (str(extra.get(key, "")) for key in NAMES[:3])
        trusted = self._source == "client"
        identity = self.make("", salt if trusted else "", session, name, claim)
        alone = self._source == "middleware" or (SEAL in extra and self._source == "shared")
        return replace(identity, workload=workload, alone=alone)

    def _seal(self, names: tuple[str, ...]) -> str:
        text = "\0".join(("seal", *names)).encode(errors="surrogatepass")
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[:SEAL_DIGITS]

    def _refuse(self) -> None:
        self.refused += 1
        if self.refused == 1:
            log.warning(
                "a request has an invalid seal, so it shares nothing: a client forged it, or the "
                "API process has another %s than this process",
                VARIABLE,
            )
