"""The operator's key: hashes names, and lets the engine verify its own middleware.

The HTTP process and the processes that run the model need the same key. Pseudonyms are comparable
for as long as the key stays. It is set by ``HVD_WORKER_ID_KEY``, or by the file that
``HVD_WORKER_ID_KEY_FILE`` names.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import SECRETS_VARIABLE, SHORTEST_KEY, short_key
from decoder.settings import WorkerSettings

VARIABLE: Final = "HVD_WORKER_ID_KEY"
FILE_VARIABLE: Final = "HVD_WORKER_ID_KEY_FILE"


def key_of(settings: WorkerSettings) -> bytes | None:
    """The key of ``settings``, given directly or by file; None if neither is set.

    Raises:
        SettingsError: the file cannot be read, or the key is too short.
    """
    key = settings.id_key.encode()
    if not key and settings.id_key_file is not None:
        try:
            key = settings.id_key_file.read_bytes().strip()
        except OSError as error:
            raise SettingsError(
                f"the key in {settings.id_key_file} cannot be read: {error.strerror}. Correct "
                f"{FILE_VARIABLE}, or unset it."
            ) from error
        if not key:
            raise SettingsError(
                f"{settings.id_key_file} is empty: write a key into it, or unset {FILE_VARIABLE}."
            )
    if key and len(key) < SHORTEST_KEY:
        raise SettingsError(short_key(f"{VARIABLE} or {FILE_VARIABLE}", len(key)))
    return key or None


def ensure_key(environment: MutableMapping[str, str]) -> bool:
    """Put a random key into ``environment`` if it has none; returns whether it did.

    Call it before starting the other processes: they inherit the key.
    """
    kept = environment.get(SECRETS_VARIABLE)
    if environment.get(VARIABLE) or environment.get(FILE_VARIABLE):
        return False
    if kept and (Path(kept) / VARIABLE.lower()).exists():
        return False
    environment[VARIABLE] = secrets.token_hex(32)
    return True
