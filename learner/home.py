"""A folder that holds state: one process at a time; and the name a learner keeps in its own."""

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
"""The file that is locked; it is never removed, or two processes could hold two of that name."""


def lock(folder: Path) -> IO[str]:
    """Take ``folder``, which is made if it is not there, until the returned file is closed or the
    process ends.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be written, or its file system has no locks.
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
    """Remove what a locked ``folder`` holds, but for its lock.

    Raises:
        OSError: something cannot be removed.
    """
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != LOCK:
            each.unlink()


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Have ``folder`` for oneself until the block ends, or the process does.

    Raises:
        SettingsError: another learner has it, or it cannot be used.
    """
    try:
        file = lock(folder)
    except BlockingIOError as error:
        raise SettingsError(
            f"another learner works in {folder}: give this one a folder of its own, "
            "HVD_LEARNER_STATE_DIR."
        ) from error
    except OSError as error:
        raise _unusable(folder, error) from error
    with file:
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
