"""Lock of a state directory, for one process at a time, and the id of the learner that owns it."""

from __future__ import annotations

import fcntl
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from decoder.contracts.errors import SettingsError

LOCK: Final = "lock"
"""The locked file. It is never removed, or two processes could hold two files of this name."""


def lock(folder: Path) -> IO[str]:
    """Lock ``folder``, creating it if needed, until the returned file is closed or the process
    ends.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the folder is not writable, or its file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def clear(folder: Path) -> None:
    """Remove the contents of a locked ``folder``, except the lock; raises OSError."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != LOCK:
            each.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a learner's state directory for the block.

    Raises:
        SettingsError: another learner uses it, or it is unusable.
    """
    try:
        file = lock(folder)
    except BlockingIOError as error:
        raise SettingsError(
            f"another learner uses {folder}: give this one a folder of its own, "
            "HVD_LEARNER_STATE_DIR."
        ) from error
    except OSError as error:
        raise _unusable(folder, error) from error
    with file:
        yield


def learner_id(folder: Path) -> str:
    """The id of the learner in ``folder``, created once: after a restart its leases are still its
    own.

    Raises:
        SettingsError: the folder is unusable.
    """
    path, new = folder / "holder", folder / "holder.new"
    try:
        name = path.read_text().strip() if path.exists() else ""
        if not name:  # it is also empty after a full disk
            name = f"learner-{secrets.token_hex(8)}"
            folder.mkdir(parents=True, exist_ok=True)
            new.write_text(f"{name}\n")
            new.replace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(folder, error) from error
    return name


def _unusable(folder: Path, error: Exception) -> SettingsError:
    return SettingsError(
        f"{folder} is unusable ({error}): set HVD_LEARNER_STATE_DIR to a folder in which this "
        "process may write and lock files."
    )
