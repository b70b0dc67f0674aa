"""The learner's folder: one process at a time, under one name."""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decoder.contracts.errors import SettingsError


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Have ``folder`` for oneself until the block ends, or the process does.

    Raises:
        SettingsError: another learner has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SettingsError(
                f"another learner works in {folder}: give this one a folder of its own, "
                "HVD_LEARNER_STATE_DIR."
            ) from error
        yield


def holder_of(folder: Path) -> str:
    """What whoever works in ``folder`` is called: made once, so that a learner that starts again
    has its own leases at once."""
    path = folder / "holder"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f"learner-{secrets.token_hex(8)}\n")
    return path.read_text().strip()
