"""Whose a request is: written and sealed in the API process, read and checked in the engine.

What travels are keys of ``vllm_xargs``, which reach the engine as a request's ``extra_args``::

    hvd_tenant, hvd_salt, hvd_session, hvd_request    pseudonyms, "" where there is none
    hvd_seal                                          HMAC of these four under the operator's key

Only what is sealed counts. So a route that the middleware cannot write into, or one that vLLM will
have tomorrow, passes on no client's word: its requests share nothing.
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
from decoder.tenancy import callers
from decoder.tenancy.key import VARIABLE, key_of
from decoder.tenancy.shares import ALONE, cache_key

log = logging.getLogger(__name__)

NAMES: Final = ("hvd_tenant", "hvd_salt", "hvd_session", "hvd_request")
SEAL: Final = "hvd_seal"
SEAL_DIGITS: Final = 32

Source = Literal["middleware", "client", "shared"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Pseudonyms of what a request belongs to, "" where there is none.

    ``alone`` says that nobody knows whose it is, so it shares nothing. ``workload`` names its kind
    of traffic in telemetry, as any client may.
    """

    tenant: str
    salt: str
    session: str
    request: str
    workload: str = ""
    alone: bool = False

    @property
    def key(self) -> str:
        """What requests have in common that may draft from each other's text."""
        return ALONE if self.alone else cache_key(self.tenant, self.salt)


class Identities:
    """Makes, seals and reads identities under one key.

    Attributes:
        refused: requests whose seal did not fit.
    """

    def __init__(self, key: bytes | None, source: Source) -> None:
        """``key`` None takes a random one: then only what this object sealed counts."""
        key = key or secrets.token_bytes(32)
        self._names = Pseudonyms(key)
        self._key = key
        self._source: Source = source
        self.refused = 0

    @classmethod
    def load(cls, settings: WorkerSettings) -> Identities:
        """Those of a worker.

        Raises:
            SettingsError: see :func:`decoder.tenancy.key.key_of`.
        """
        return cls(key_of(settings), settings.tenants)

    def make(self, caller: str, salt: str, session: str, request: str, word: str = "") -> Identity:
        """The identity of a request.

        Args:
            caller: whoever the API key or the gateway says it is; "" for anybody.
            word: what the client calls its tenant: a part of the caller's, where clients are
                believed.
        """
        if word and self._source == "client":
            caller = callers.of_word(caller, word)
        tenant = self._names.of("tenant", caller)
        return Identity(
            tenant,
            self._names.of("salt", salt),
            self._names.of("session", f"{tenant}/{session}") if session else "",
            self._names.of("request", request),
        )

    def sealed(self, identity: Identity) -> dict[str, str]:
        """What to write into a request."""
        told = (identity.tenant, identity.salt, identity.session, identity.request)
        return {**dict(zip(NAMES, told, strict=True)), SEAL: self._seal(told)}

    def of(self, extra_args: Mapping[str, Any] | None, name: str) -> Identity:
        """Whose the request is that came with ``extra_args``; never raises.

        Args:
            name: the engine's own for the request, in place of one that the middleware gave.
        """
        extra = extra_args or {}
        workload = self._names.workload(str(extra.get("hvd_workload", "")))
        if SEAL in extra:
            tenant, salt, session, request = (str(extra.get(key, "")) for key in NAMES)
            told = (tenant, salt, session, request)
            seal = str(extra[SEAL]).encode(errors="replace")
            if hmac.compare_digest(seal, self._seal(told).encode()):
                return Identity(*told, workload)
            self._refuse()
        word, salt, session = (str(extra.get(key, "")) for key in NAMES[:3])
        if self._source == "client":
            made = self.make("", salt, session, name, word)
        else:
            made = self.make("", "", session, name)
        alone = self._source == "middleware" or (SEAL in extra and self._source == "shared")
        return replace(made, workload=workload, alone=alone)

    def _seal(self, told: tuple[str, ...]) -> str:
        text = "\0".join(("seal", *told)).encode(errors="surrogatepass")
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[:SEAL_DIGITS]

    def _refuse(self) -> None:
        self.refused += 1
        if self.refused == 1:
            log.warning(
                "a request's seal does not fit, so it shares nothing: a client made one up, or the "
                "API process has another %s than this one",
                VARIABLE,
            )
