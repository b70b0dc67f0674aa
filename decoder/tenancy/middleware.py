"""ASGI middleware for vLLM's ``--middleware``: says whose a request is, over any client's word.

::

    vllm serve ... --middleware decoder.tenancy.middleware.TenantMiddleware

vLLM puts it outside its own check of API keys, so nothing of a body is read before that check has
let the request in: the body is rewritten when the route asks for it. What is rewritten follows one
rule, not a list of routes: the body of any POST, PUT or PATCH that is a JSON object gets sealed
``vllm_xargs``, and ``sampling_params.extra_args`` where it has ``sampling_params``. Forms (audio)
and websockets pass as they are, and so does what is no JSON, for vLLM to answer: without a seal,
the engine believes nothing in them.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from decoder.contracts.errors import SettingsError
from decoder.settings import WorkerSettings
from decoder.tenancy import callers
from decoder.tenancy.identities import Identities

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

ANSWER_HEADER: Final = b"x-hvd-request"
"""Of a response: the pseudonym under which telemetry knows the request."""
SESSION_HEADER: Final = b"x-hvd-session"
"""Of a request, if the client likes: which conversation it belongs to."""
WRITING: Final = frozenset({"POST", "PUT", "PATCH"})
FORMS: Final = (b"multipart/", b"application/x-www-form-urlencoded")


class TenantMiddleware:
    """Writes into each request whose it is. One for each API process."""

    def __init__(self, app: App) -> None:
        """Wrap ``app``. Where the settings are unusable, requests pass without being sealed."""
        self._app = app
        self._identities: Identities | None = None
        self._header = b""
        try:
            settings = WorkerSettings.load()
            self._identities = Identities.load(settings)
            self._header = settings.tenant_header.lower().encode()
        except SettingsError as error:
            log.error("tenants cannot be told apart, so requests share nothing: %s", error)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        identities = self._identities
        if identities is None or scope["type"] != "http" or scope["method"] not in WRITING:
            await self._app(scope, receive, send)
            return
        headers: Headers = list(scope["headers"])
        if self._header and len(_all(headers, self._header)) > 1:
            await _refuse(send, self._header)
            return
        name = _first(headers, b"x-request-id") or secrets.token_hex(16)
        caller, session = self._caller(headers), _first(headers, SESSION_HEADER)
        shown = identities.make("", "", "", name).request.encode()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (ANSWER_HEADER, shown)]}
            await send(message)

        if _first(headers, b"content-type").lower().encode("latin-1").startswith(FORMS):
            await self._app(scope, receive, answer)
            return

        def sealed(salt: str, word: str, spoken: str) -> dict[str, str]:
            return identities.sealed(identities.make(caller, salt, session or spoken, name, word))

        # Its length is known only once it is rewritten.
        kept = [(key, value) for key, value in headers if key.lower() != b"content-length"]
        await self._app({**scope, "headers": kept}, _rewriting(receive, sealed), answer)

    def _caller(self, headers: Headers) -> str:
        """Who the gateway, or else the API key, says that this is; "" if neither does."""
        if self._header and (named := _first(headers, self._header)):
            return callers.of_header(named)
        if given := _first(headers, b"authorization"):  # what vLLM checks goes before all others
            return callers.of_authorization(given)
        key = _first(headers, b"x-api-key")
        return callers.of_key(key) if key else ""


Sealed = Callable[[str, str, str], dict[str, str]]


def _rewriting(receive: Receive, sealed: Sealed) -> Receive:
    """``receive`` whose first message is the whole body, sealed; later ones are as they come."""
    asked = False

    async def rewritten() -> Message:
        nonlocal asked
        if asked:
            return await receive()
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return message
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        asked = True
        whole = b"".join(parts)
        parts.clear()
        return {"type": "http.request", "body": sealed_body(whole, sealed), "more_body": False}

    return rewritten


def sealed_body(body: bytes, sealed: Sealed) -> bytes:
    """``body`` with what ``sealed`` says of it; as it is unless it is a JSON object.

    Args:
        sealed: from the salt, the client's names for its tenant and for its session, to the keys.
    """
    try:
        parsed = json.loads(body)
        if not isinstance(parsed, dict):
            return body
        _write(parsed, sealed)
        return json.dumps(parsed, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return body  # vLLM reads it by the same function, and says what is wrong


def _write(body: dict[str, Any], sealed: Sealed) -> None:
    salt = body.get("cache_salt")
    parameters = body.get("sampling_params")
    places = [(body, "vllm_xargs")]
    if isinstance(parameters, dict):
        places.append((parameters, "extra_args"))
    for owner, key in places:
        extra = owner.get(key)
        if extra is None:
            extra = owner[key] = {}
        if isinstance(extra, dict):  # anything else is refused by vLLM
            word, session = (str(extra.get(k, "")) for k in ("hvd_tenant", "hvd_session"))
            extra.update(sealed(salt if isinstance(salt, str) else "", word, session))


def _all(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in headers if key.lower() == name]


def _first(headers: Headers, name: bytes) -> str:
    return next(iter(_all(headers, name)), "")


async def _refuse(send: Send, header: bytes) -> None:
    said = (
        f"The header {header.decode()} came more than once: let the gateway replace what a client "
        "sends, and not add to it."
    )
    error = {"message": said, "type": "BadRequestError", "param": None, "code": 400}
    body = json.dumps({"error": error}).encode()
    kinds = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": kinds})
    await send({"type": "http.response.body", "body": body})
