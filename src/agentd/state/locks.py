"""Locks: one daemon for each state folder, and one for each node id on this host.

They are flock(2) locks, which end with their process.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from agentd.errors import StartRefused

UNWRITABLE = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors that pass or that an operator can fix, while the node continues."""


def lock_holder(folder: Path) -> str | None:
    """Return the process that holds the lock of a state folder, None if it is free.

    Raises:
        OSError: the lock cannot be inspected.
    """
    try:
        with (folder / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return (folder / "lock").read_text(errors="replace").strip() or "another"


class Locks:
    """The locks of this daemon, held until `close`."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def acquire(self, path: Path, refusal: str) -> str:
        """Lock a file; return a warning, empty if there is none.

        Raises:
            StartRefused: another process holds it (`refusal`), or it cannot be opened.
        """
        descriptor, warning = _open_lock_file(path)
        if descriptor is None:
            return warning
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise StartRefused(f"{refusal} (pid {holder})") from None
        self._descriptors.append(descriptor)
        with suppress(OSError):  # the holder's pid is only for display
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return warning

    def close(self) -> None:
        """Release every lock."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _open_lock_file(path: Path) -> tuple[int | None, str]:
    """Open a lock file; None with the reason if it cannot be opened."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600), ""
    except OSError as error:
        if error.errno not in (*UNWRITABLE, errno.ENOENT):
            raise StartRefused(f"{path}: {error.strerror}") from None
        warning = f"cannot be written: {error.strerror}"
    with suppress(OSError):
        return os.open(path, os.O_RDONLY | flags), warning
    return None, warning
