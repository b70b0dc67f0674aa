"""OAuth tokens for Kafka: read from a file that is renewed, or fetched by client credentials."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from kafka.errors import KafkaConnectionError
from kafka.net.sasl.oauth import AbstractTokenProvider

from decoder.contracts.loopback import is_loopback
from decoder.contracts.masking import masked
from decoder.contracts.settings import KafkaSettings

FETCH_SECONDS: Final = 5.0
RENEW_AT: Final = 0.8
"""Share of a token's lifetime after which the next connection fetches another."""
LIFE_SECONDS: Final = 60.0
"""Lifetime of a token whose answer states none, and interval of reading a file again."""


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """Tokens of one client; kafka-python asks for one at every connection."""

    def __init__(self, kafka: KafkaSettings) -> None:
        super().__init__()
        self._kafka = kafka
        self._cached, self._renew_at = "", 0.0
        self._expires_at = 0.0
        self._lock = threading.Lock()

    def token(self) -> str:
        """A valid token.

        Raises:
            KafkaConnectionError: the file cannot be read, or the server issues no token.
        """
        if self._kafka.sasl_oauth_token_file is not None:
            try:
                return self._kafka.sasl_oauth_token_file.read_text().strip()
            except OSError as error:
                raise KafkaConnectionError(f"no token for Kafka: {error}") from error
        with self._lock:
            if time.monotonic() >= self._renew_at:
                self._fetch()
            return self._cached

    def expiring_token(self, settings: str) -> tuple[str, float]:
        """librdkafka's callback: a token and its expiry, in seconds since the epoch. It keeps the
        token for many connections. ``settings`` is unused.

        Raises:
            KafkaConnectionError: as :meth:`token`.
        """
        token = self.token()
        file = self._kafka.sasl_oauth_token_file is not None
        return token, time.time() + LIFE_SECONDS if file else self._expires_at

    def _fetch(self) -> None:
        """Fetch a token by the client-credentials grant (RFC 6749, section 4.4)."""
        import httpx

        kafka = self._kafka
        form = {"grant_type": "client_credentials"}
        if kafka.sasl_oauth_scope is not None:
            form["scope"] = kafka.sasl_oauth_scope
        auth = (kafka.sasl_oauth_client_id or "", kafka.sasl_oauth_client_secret or "")
        url = str(kafka.sasl_oauth_token_url)
        try:
            response = httpx.post(
                url, data=form, auth=auth, timeout=FETCH_SECONDS, trust_env=not is_loopback(url)
            )
            answer: dict[str, Any] = response.raise_for_status().json()
            self._cached = str(answer["access_token"])
            lifetime = float(answer.get("expires_in", LIFE_SECONDS))
        except httpx.InvalidURL:  # its message holds part of the address, perhaps a password
            raise KafkaConnectionError(f"no token for Kafka: {masked(url)} is no address") from None
        except (httpx.HTTPError, ImportError, ValueError, KeyError, TypeError) as error:
            raise KafkaConnectionError(
                masked(f"{url} gives no token for Kafka: {error!r}")
            ) from None  # its message names the address unmasked
        self._renew_at = time.monotonic() + RENEW_AT * lifetime
        self._expires_at = time.time() + lifetime
