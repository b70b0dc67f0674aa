"""The exceptions that this project raises.

::

    HvdError -- SettingsError, ModelError, EngineError, BrokerError, RegistryError, ProcessError,
    |           TraceError
    `-- ContractError -- PolicyRefused
        `-- EventRefused -- SchemaUnknown

A message says what was wrong, where, and what to do about it.
"""

from __future__ import annotations

from typing import Final

from decoder.contracts.masking import masked

MAX_CHARACTERS: Final = 1_000
"""Characters of an error about a message, whose field names may be megabytes long."""


class HvdError(Exception):
    """Root of the project's errors; a command prints its message and exits with status 2.

    Passwords in addresses are masked.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(masked(message))


class SettingsError(HvdError):
    """A setting has an unknown name or a value out of range."""


class ModelError(HvdError):
    """A model, drafter or tokenizer is missing or does not fit."""


class EngineError(HvdError):
    """The serving engine cannot host hybrid decoding as it is configured."""


class BrokerError(HvdError):
    """Kafka cannot be reached or refuses what was asked."""


class RegistryError(HvdError):
    """MLflow cannot be reached or holds something unusable."""


class ProcessError(HvdError):
    """A process of the stack did not start, or died."""


class TraceError(HvdError):
    """A trace file cannot be read, or holds too little to measure anything on."""


class ContractError(HvdError):
    """A message violates the contract of its topic."""

    def __init__(self, message: str = "") -> None:
        super().__init__(masked(message)[:MAX_CHARACTERS])


class EventRefused(ContractError):
    """A draft-event record is malformed or of an unknown schema.

    Attributes:
        reason: one of ``malformed``, ``contract``, ``schema`` or ``range``; a label for counters.
    """

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class SchemaUnknown(EventRefused):
    """A draft-event record of another feature schema, otherwise well-formed as far as known.

    Attributes:
        schema: its schema's id.
    """

    def __init__(self, schema: str, known: str) -> None:
        super().__init__(f"draft events of schema {schema}, this reader has {known}", "schema")
        self.schema = schema


class PolicyRefused(ContractError):
    """A policy bundle is malformed, damaged, or not meant for this scope or schema.

    Attributes:
        reason: one of ``malformed``, ``dtype``, ``digest``, ``scope``, ``schema``, ``shape``,
            ``nonfinite``, ``probe``, ``role``, ``signature``, ``missing``, or ``slow``; a label for
            counters.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
