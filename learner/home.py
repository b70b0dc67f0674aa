"""The learner's folder: one process at a time, under one name."""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from decoder.contracts.errors import SettingsError


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Have ``folder`` for oneself until the block ends, or the process does.

    Raises:
        SettingsError: another learner has it, or it cannot be used.
    """
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((folder / "lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingsError(
                f"another learner works in {folder}: give this one a folder of its own, "
                "HVD_LEARNER_STATE_DIR."
            ) from error
        except OSError as error:
            raise _unusable(folder, error) from error
        yield


def holder_of(folder: Path) -> str:
    """What whoever works in ``folder`` is called: made once, so that a learner that starts again
    has its own leases at once.

    Raises:
        SettingsError: the folder cannot be used.
    """
    path, fresh = folder / "holder", folder / "holder.new"
    try:
        name = path.read_text().strip() if path.exists() else ""
        if not name:  # none was made, or none that a disk had room for
            name = f"learner-{secrets.token_hex(8)}"
            folder.mkdir(parents=True, exist_ok=True)
            fresh.write_text(f"{name}\n")
            fresh.replace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(folder, error) from error
    return name


def _unusable(folder: Path, error: Exception) -> SettingsError:
    return SettingsError(
        f"{folder} cannot be used ({error}): name a folder that this process may write and lock "
        "files in, by HVD_LEARNER_STATE_DIR."
    )
