"""The base of all settings, and the Kafka settings that every process shares.

Each process has one frozen class of settings, read from environment variables with its own prefix
(``HVD_KAFKA_``, ``HVD_WORKER_``, ``HVD_LEARNER_``). An unknown name or an invalid value stops the
process with one sentence that names the variable and the choices.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import reprlib
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from decoder.contracts.errors import SettingsError
from decoder.contracts.masking import masked

PREFIXES = ("HVD_KAFKA_", "HVD_WORKER_", "HVD_LEARNER_")
SECRETS_VARIABLE = "HVD_SECRETS_DIR"
"""A folder of secrets, as Kubernetes and compose mount them: one file a setting, named like its
variable in lower case."""
GLOBAL_VARIABLES = ("HVD_CPU_FLAGS", SECRETS_VARIABLE)
"""Read by ``pipelines/machine.py``, and by :meth:`Settings.load` itself."""

_KUBERNETES_SERVICE = re.compile(
    r"HVD_\w+_SERVICE_HOST=.*"
    r"|HVD_\w+_SERVICE_PORT(_\w+)?=\d+"
    r"|HVD_\w+_PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://.*"
    r"|HVD_\w+_PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*"
)
"""Variables that Kubernetes sets in every container of a namespace for a service named like
``hvd-learner``."""

SHORTEST_KEY = 16  # bytes of a key; a shorter one could be guessed
_PORT = re.compile("[1-9][0-9]{0,4}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # what is no UTF-8 in the environment
_SHORT = reprlib.Repr()
_SHORT.maxstring = 100  # a value may be a whole file, pasted by mistake

log = logging.getLogger(__name__)

T = TypeVar("T", bound="Settings")


def setting(default: Any, meaning: str, **limits: Any) -> Any:
    """A setting: its default, one sentence of help, and pydantic's limits."""
    return Field(default, description=meaning, **limits)


secret = partial(setting, repr=False)
"""A setting whose value no message shows."""


class Settings(BaseSettings):
    """Base of the settings classes: frozen, and strict about the environment."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Former variables by name, with the variable that replaces each. They work for one release."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Read the environment.

        Raises:
            SettingsError: a variable with this class's prefix is unknown or holds an invalid
                value, or a variable begins with ``HVD_`` and has no known prefix. Kubernetes' own
                variables of a service are ignored with a warning, even under a setting's name.
        """
        prefix = str(cls.model_config.get("env_prefix", ""))
        known = {(prefix + name).upper(): name for name in cls.model_fields}
        folder = os.environ.get(SECRETS_VARIABLE)
        if folder and not Path(folder).is_dir():
            raise SettingsError(f"{SECRETS_VARIABLE} names {folder}, which is not a folder.")
        files = [file.name.upper() for file in Path(folder).iterdir()] if folder else []
        for name, value in {**dict.fromkeys(files, ""), **os.environ}.items():
            if not name.startswith("HVD_") or name in GLOBAL_VARIABLES:
                continue
            if _KUBERNETES_SERVICE.fullmatch(f"{name}={value}"):
                log.warning("%s belongs to a Kubernetes service and is no setting: ignored", name)
                if name in known:
                    default = cls.model_fields[known[name]].get_default(
                        call_default_factory=True, validated_data=overrides
                    )
                    overrides.setdefault(known[name], default)
            elif name in cls.renamed:
                now = cls.renamed[name]
                log.warning("%s is now called %s: rename it before the next release", name, now)
                if now not in os.environ:
                    overrides.setdefault(known[now], os.environ.get(name, ""))
            elif name in known:
                if _SURROGATE.search(value):
                    raise SettingsError(f"setting {name} is not valid UTF-8.")
            elif name.startswith(prefix) or not name.startswith(PREFIXES):
                raise SettingsError(_unknown(name, sorted(known)))
        try:
            return cls(**{"_secrets_dir": folder or None, **overrides})
        except ValidationError as error:
            raise SettingsError(cls._invalid(error.errors()[0], prefix)) from None

    @classmethod
    def _invalid(cls, error: Mapping[str, Any], prefix: str) -> str:
        """A sentence about pydantic's first ``error``, without secret values."""
        field = ".".join(str(part) for part in error["loc"])
        if not field:  # a check of several fields, whose values may be secret
            return str(error["ctx"]["error"])
        shown = _SHORT.repr(masked(str(error.get("input"))))
        if field in cls.model_fields and not cls.model_fields[field].repr:
            shown = "a secret"
        return f"setting {prefix}{field.upper()} is not valid: {error['msg']} (got {shown})."


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"unknown setting {_SHORT.repr(name)[1:-1]}.{hint} Known here: {', '.join(known)}."


class KafkaSettings(Settings):
    """How to reach the broker. Names are kafka-python's own, except those of OAuth.

    With ``sasl_mechanism`` OAUTHBEARER a token is read from ``sasl_oauth_token_file`` at every
    connection (a worker's producer reads it every minute, as its writer renews it), or fetched from
    ``sasl_oauth_token_url`` with the client's id and secret (the client-credentials grant of
    RFC 6749).
    """

    model_config = SettingsConfigDict(env_prefix="HVD_KAFKA_", frozen=True, extra="forbid")

    bootstrap_servers: str = setting(
        "127.0.0.1:9092", "host:port of the broker, several with commas between them"
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = setting(
        "PLAINTEXT", "encryption and authentication of connections"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = (
        setting(None, "SASL mechanism, with a SASL protocol")
    )
    sasl_plain_username: str | None = setting(None, "for PLAIN and SCRAM")
    sasl_plain_password: str | None = secret(None, "for PLAIN and SCRAM")
    sasl_oauth_token_file: Path | None = setting(
        None, "file with the token, read at every connection"
    )
    sasl_oauth_token_url: str | None = setting(
        None, "endpoint to fetch tokens from instead, with the client's id and secret"
    )
    sasl_oauth_client_id: str | None = setting(None, "of the client at that endpoint")
    sasl_oauth_client_secret: str | None = secret(None, "of the client at that endpoint")
    sasl_oauth_scope: str | None = setting(None, "scope requested with the token")
    ssl_cafile: Path | None = setting(
        None, "CA certificates that verify the broker; the system's by default"
    )
    ssl_certfile: Path | None = setting(
        None, "this client's certificate, if the broker requires one"
    )
    ssl_keyfile: Path | None = setting(None, "its key, unless that is in the same file")
    ssl_password: str | None = secret(None, "of that key")
    policy_key: str = secret(
        "", "key that signs policies, the same for learners and workers; empty: unsigned"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for error_in in (_servers_error, _sasl_error, _tls_error, _key_error):
            if error := error_in(self):
                raise ValueError(error)
        return self

    @property
    def needs_tokens(self) -> bool:
        """Whether a client needs OAuth tokens in addition to :meth:`client_options`."""
        return self.sasl_mechanism == "OAUTHBEARER"

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments common to kafka-python's producer, consumer and admin client."""
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in self.model_dump(exclude={"policy_key"}, exclude_none=True).items()
            if not name.startswith("sasl_oauth_")
        }
        return options | {"bootstrap_servers": self.bootstrap_servers.split(",")}


# Each returns why the settings are inconsistent; "" if they are not.


def _servers_error(kafka: KafkaSettings) -> str:
    for address in kafka.bootstrap_servers.split(","):
        host, _, port = address.strip().rpartition(":")
        bare = not host.startswith("[") and (":" in host or "/" in host)
        if not host or bare or not _PORT.fullmatch(port) or int(port) > 65535:
            return (
                "HVD_KAFKA_BOOTSTRAP_SERVERS takes host:port, several with commas between them: "
                f"{_SHORT.repr(address.rpartition('@')[2])} is none."
            )
    return ""


def _sasl_error(kafka: KafkaSettings) -> str:
    mechanism, file = kafka.sasl_mechanism, kafka.sasl_oauth_token_file is not None
    login = kafka.sasl_plain_username, kafka.sasl_plain_password
    client = kafka.sasl_oauth_token_url, kafka.sasl_oauth_client_id, kafka.sasl_oauth_client_secret
    if kafka.security_protocol.startswith("SASL_") != (mechanism is not None):
        return (
            "HVD_KAFKA_SASL_MECHANISM and a HVD_KAFKA_SECURITY_PROTOCOL of SASL_SSL or "
            "SASL_PLAINTEXT belong together: set both, or neither."
        )
    if mechanism not in (None, "OAUTHBEARER") and None in login:
        return f"{mechanism} takes HVD_KAFKA_SASL_PLAIN_USERNAME and HVD_KAFKA_SASL_PLAIN_PASSWORD."
    if mechanism == "OAUTHBEARER" and client.count(None) != len(client) * file:
        return (
            "OAUTHBEARER takes either HVD_KAFKA_SASL_OAUTH_TOKEN_FILE, or all of "
            "HVD_KAFKA_SASL_OAUTH_TOKEN_URL, _CLIENT_ID and _CLIENT_SECRET."
        )
    return ""


def _key_error(kafka: KafkaSettings) -> str:
    length = len(kafka.policy_key.encode())
    return short_key("HVD_KAFKA_POLICY_KEY", length) if 0 < length < SHORTEST_KEY else ""


def short_key(name: str, length: int) -> str:
    """The error of a key called ``name`` that is shorter than ``SHORTEST_KEY``."""
    return (
        f"the key of {name} has {length} bytes: take at least {SHORTEST_KEY}, for instance the "
        "output of: openssl rand -hex 32."
    )


def _tls_error(kafka: KafkaSettings) -> str:
    certificate, key = kafka.ssl_certfile, kafka.ssl_keyfile
    if not kafka.security_protocol.endswith("SSL"):
        needless = any(value is not None for name, value in kafka if name.startswith("ssl_"))
        return needless * "HVD_KAFKA_SSL_* needs a HVD_KAFKA_SECURITY_PROTOCOL of SSL or SASL_SSL."
    if certificate is None and key is not None:
        return "HVD_KAFKA_SSL_KEYFILE needs HVD_KAFKA_SSL_CERTFILE."
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if kafka.ssl_cafile is not None:
            context.load_verify_locations(kafka.ssl_cafile)
    except OSError as error:
        return f"HVD_KAFKA_SSL_CAFILE {kafka.ssl_cafile} is not a file of certificates ({error})."
    try:
        if certificate is not None:
            # Without any password, OpenSSL would ask for one on the terminal, and wait.
            context.load_cert_chain(certificate, key, lambda: kafka.ssl_password or "")
    except OSError as error:
        return (
            f"HVD_KAFKA_SSL_CERTFILE {certificate} with HVD_KAFKA_SSL_KEYFILE {key or certificate} "
            f"cannot be used ({error}): is the key that of the certificate, and is "
            "HVD_KAFKA_SSL_PASSWORD its password?"
        )
    return ""
