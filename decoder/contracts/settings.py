"""Settings shared by every process: how to reach Kafka, and how settings are read at all.

Each process has one frozen class of settings, filled from environment variables with its own
prefix (``HVD_KAFKA_``, ``HVD_WORKER_``, ``HVD_LEARNER_``). An unknown name or a bad value stops
the process with one sentence that names the variable and the choices.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from decoder.contracts.errors import SettingsError

PREFIXES = ("HVD_KAFKA_", "HVD_WORKER_", "HVD_LEARNER_")
OF_THE_COMMANDS = ("HVD_CPU_FLAGS",)
"""Read by what starts the processes (``pipelines/machine.py``), and by none of them."""

_OF_A_SERVICE = re.compile(
    r"HVD_\w+_SERVICE_HOST=.*"
    r"|HVD_\w+_SERVICE_PORT(_\w+)?=\d+"
    r"|HVD_\w+_PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://.*"
    r"|HVD_\w+_PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*"
)
"""Names and values that Kubernetes puts into every container of a namespace with a service called
``hvd-learner`` or the like."""

log = logging.getLogger(__name__)

T = TypeVar("T", bound="Settings")


class Settings(BaseSettings):
    """Base of the settings classes: frozen, and strict about the environment."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Read the environment.

        Raises:
            SettingsError: a variable with this class's prefix is unknown or holds a bad value, or
                a variable begins with ``HVD_`` and belongs to no prefix at all. What Kubernetes
                says of a service is neither, and is passed over with a warning, also where it has
                the name of a setting.
        """
        prefix = str(cls.model_config.get("env_prefix", ""))
        known = {(prefix + name).upper(): name for name in cls.model_fields}
        for name, value in os.environ.items():
            if not name.startswith("HVD_") or name in OF_THE_COMMANDS:
                continue
            if _OF_A_SERVICE.fullmatch(f"{name}={value}"):
                log.warning("%s is of a Kubernetes service, and no setting: ignored", name)
                if name in known:
                    default = cls.model_fields[known[name]].get_default(call_default_factory=True)
                    overrides.setdefault(known[name], default)
                continue
            if name in known:
                continue
            if name.startswith(prefix) or not name.startswith(PREFIXES):
                close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise SettingsError(
                    f"unknown setting {name}.{hint} Known here: {', '.join(sorted(known))}."
                )
        try:
            return cls(**overrides)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise SettingsError(
                f"setting {prefix}{field.upper()} is not valid: {first['msg']} "
                f"(got {first.get('input')!r})."
            ) from error


class KafkaSettings(Settings):
    """How to reach the broker; the names are kafka-python's own."""

    model_config = SettingsConfigDict(env_prefix="HVD_KAFKA_", frozen=True, extra="forbid")

    bootstrap_servers: str = "127.0.0.1:9092"
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: str | None = None
    sasl_plain_username: str | None = None
    sasl_plain_password: str | None = Field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments common to kafka-python's producer, consumer and admin client."""
        options = self.model_dump(exclude_none=True)
        options["bootstrap_servers"] = self.bootstrap_servers.split(",")
        return options
