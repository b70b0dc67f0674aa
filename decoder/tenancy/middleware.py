"""ASGI middleware for vLLM's ``--middleware``: identifies the tenant, whatever a client claims.

::

    vllm serve ... --middleware decoder.tenancy.middleware.TenantMiddleware

vLLM runs it outside its own check of API keys. The body is therefore rewritten only when the route
reads it, after that check. One rule holds for all routes: the body of any POST, PUT or PATCH that
is a JSON object gets sealed ``vllm_xargs``, and ``sampling_params.extra_args`` where it has
``sampling_params``. Forms (audio), websockets and bodies that are not JSON pass unchanged: without
a seal, the engine trusts nothing in them.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoder.contracts.errors import SettingsError
from decoder.settings import WorkerSettings
from decoder.tenancy.identities import HEADER, KEY, Identities, of_authorization

log = logging.getLogger(__name__)

ANSWER_HEADER: Final = b"x-hvd-request"
"""Response header: the request's pseudonym in telemetry."""
SESSION_HEADER: Final = "x-hvd-session"
"""Optional request header: the conversation that the request belongs to."""
WRITING: Final = frozenset({"POST", "PUT", "PATCH"})
FORMS: Final = ("multipart/", "application/x-www-form-urlencoded")


class TenantMiddleware:
    """Seals each request's identity into its body. One for each API process."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``. With unusable settings, requests pass unsealed."""
        self._app = app
        self._identities: Identities | None = None
        self._header = ""
        try:
            settings = WorkerSettings.load()
            self._identities = Identities.load(settings)
            self._header = settings.tenant_header.lower().encode().decode("latin-1")
        except SettingsError as error:
            log.error("tenants cannot be identified, so requests share nothing: %s", error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        identities = self._identities
        if identities is None or scope["type"] != "http" or scope["method"] not in WRITING:
            await self._app(scope, receive, send)
            return
        headers = Headers(raw=[(key.lower(), value) for key, value in scope["headers"]])
        if self._header and len(headers.getlist(self._header)) > 1:
            message = (
                f"The header {self._header} came more than once: let the gateway replace what a "
                "client sends, and not add to it."
            )
            error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)
            return
        name = _first(headers, "x-request-id") or secrets.token_hex(16)
        caller, session = self._caller(headers), _first(headers, SESSION_HEADER)
        shown = identities.make("", "", "", name).request.encode()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (ANSWER_HEADER, shown)]}
            await send(message)

        if _first(headers, "content-type").lower().startswith(FORMS):
            await self._app(scope, receive, answer)
            return

        def sealed(salt: str, claim: str, named: str) -> dict[str, str]:
            return identities.sealed(identities.make(caller, salt, session or named, name, claim))

        # Its length is known only once it is rewritten.
        kept = [(key, value) for key, value in headers.raw if key != b"content-length"]
        await self._app({**scope, "headers": kept}, _rewriting(receive, sealed), answer)

    def _caller(self, headers: Headers) -> str:
        """The caller named by the gateway, else by the API key; "" if by neither."""
        if self._header and (named := _first(headers, self._header)):
            return HEADER + named
        if given := _first(headers, "authorization"):  # what vLLM checks goes before all others
            return of_authorization(given)
        key = _first(headers, "x-api-key")
        return KEY + key if key else ""


Sealed = Callable[[str, str, str], dict[str, str]]
"""From the salt and the client's names for its tenant and session, to the keys to write."""


def _rewriting(receive: Receive, sealed: Sealed) -> Receive:
    """``receive`` whose first message is the whole body, sealed; later messages pass unchanged."""
    rewritten_once = False

    async def rewritten() -> Message:
        nonlocal rewritten_once
        if rewritten_once:
            return await receive()
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return message
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        rewritten_once = True
        whole = b"".join(parts)
        parts.clear()
        return {"type": "http.request", "body": _sealed_body(whole, sealed), "more_body": False}

    return rewritten


def _sealed_body(body: bytes, sealed: Sealed) -> bytes:
    """``body`` with the keys of ``sealed``; unchanged unless it is a JSON object."""
    try:
        parsed = json.loads(body)
        if not isinstance(parsed, dict):
            return body
        salt, parameters = parsed.get("cache_salt"), parsed.get("sampling_params")
        owners = [(parsed, "vllm_xargs")]
        if isinstance(parameters, dict):
            owners.append((parameters, "extra_args"))
        for owner, key in owners:
            extra = {} if owner.get(key) is None else owner[key]
            if isinstance(extra, dict):  # anything else is refused by vLLM
                claim, session = (str(extra.get(k, "")) for k in ("hvd_tenant", "hvd_session"))
                keys = sealed(salt if isinstance(salt, str) else "", claim, session)
                owner[key] = extra | keys
        return json.dumps(parsed, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return body  # vLLM parses it by the same function, and reports what is wrong


def _first(headers: Headers, name: str) -> str:
    return headers.get(name, "").strip()
