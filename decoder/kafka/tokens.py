"""OAuth tokens for Kafka: read from a file that somebody renews, or fetched for a client's id."""

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
"""Part of a token's life after which the next connection fetches another."""
LIFE_SECONDS: Final = 60.0
"""Of a token of which nobody says how long it lives, and between two looks at a file."""


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """Of one client; kafka-python asks for a token at every connection."""

    def __init__(self, kafka: KafkaSettings) -> None:
        super().__init__()
        self._kafka = kafka
        self._held, self._renew_at = "", 0.0
        self._until = 0.0
        self._lock = threading.Lock()

    def token(self) -> str:
        """A token that holds now.

        Raises:
            KafkaConnectionError: the file cannot be read, or nobody gives a token.
        """
        if self._kafka.sasl_oauth_token_file is not None:
            try:
                return self._kafka.sasl_oauth_token_file.read_text().strip()
            except OSError as error:
                raise KafkaConnectionError(f"no token for Kafka: {error}") from error
        with self._lock:
            if time.monotonic() >= self._renew_at:
                self._fetch()
            return self._held

    def told(self, settings: str) -> tuple[str, float]:
        """A token, and until when it is not asked for again, seconds since the epoch: how
        librdkafka asks, which keeps one for many connections. ``settings`` are not used.

        Raises:
            KafkaConnectionError: as :meth:`token`.
        """
        token = self.token()
        file = self._kafka.sasl_oauth_token_file is not None
        return token, time.time() + LIFE_SECONDS if file else self._until

    def _fetch(self) -> None:
        """Ask by the client-credentials grant (RFC 6749, section 4.4)."""
        import httpx

        kafka = self._kafka
        asked = {"grant_type": "client_credentials"}
        if kafka.sasl_oauth_scope is not None:
            asked["scope"] = kafka.sasl_oauth_scope
        who = (kafka.sasl_oauth_client_id or "", kafka.sasl_oauth_client_secret or "")
        url = str(kafka.sasl_oauth_token_url)
        try:
            answer = httpx.post(
                url, data=asked, auth=who, timeout=FETCH_SECONDS, trust_env=not is_loopback(url)
            )
            told: dict[str, Any] = answer.raise_for_status().json()
            self._held = str(told["access_token"])
            life = float(told.get("expires_in", LIFE_SECONDS))
        except httpx.InvalidURL:  # whose words hold a part of the address, be it of a password
            raise KafkaConnectionError(f"no token for Kafka: {masked(url)} is no address") from None
        except (httpx.HTTPError, ImportError, ValueError, KeyError, TypeError) as error:
            raise KafkaConnectionError(
                masked(f"{url} gives no token for Kafka: {error!r}")
            ) from None  # which names the address as it is
        self._renew_at, self._until = time.monotonic() + RENEW_AT * life, time.time() + life
