"""Every error this project raises on purpose.

::

    HvdError
    |-- SettingsError     a setting has an unknown name or a value out of range
    |-- ModelError        a model, drafter or tokenizer is missing or does not fit
    |-- EngineError       the serving engine cannot host hybrid decoding as configured
    |-- BrokerError       Kafka cannot be reached or refuses what was asked
    |-- RegistryError     MLflow cannot be reached or holds something unusable
    |-- ProcessError      a process of the stack did not start, or died
    |-- TraceError        recorded generations cannot be read, or hold too little
    `-- ContractError     a message does not keep the contract of its topic
        |-- EventRefused  a draft-event record (counted by the reader, set aside)
        |   `-- SchemaUnknown   of another feature schema (counted, passed over)
        `-- PolicyRefused a policy bundle (the one in force stays in force)

A message says what was wrong, where, and what to do about it.
"""

from __future__ import annotations

from typing import Final

from decoder.contracts.redacted import redacted

LONGEST: Final = 1_000
"""Characters of what is said of a message: its names are its maker's, megabytes of them or not."""


class HvdError(Exception):
    """Root of the project's errors; a command prints its message and exits with status 2.

    No message holds a password of an address, whatever raised it.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message))


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
    """A message does not keep the contract of its topic."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message)[:LONGEST])


class EventRefused(ContractError):
    """A draft-event record is malformed or of an unknown schema.

    Attributes:
        reason: one of ``malformed``, ``contract``, ``schema`` or ``range``; a label for counters.
    """

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class SchemaUnknown(EventRefused):
    """A draft-event record of another feature schema, whole otherwise for all that can be told.

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
