"""Locks: one daemon for each state folder, and one for each node id on this host.

They are flock(2) locks, which end with their process. The lock of a file that was removed or
replaced excludes nobody, so `acquire` takes it again. That also lets a holder remove its file at
its end.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from agentd.errors import StartRefused
from agentd.os_errors import OsErrorKind, os_error_kind


def run_folder() -> Path:
    """Return the folder of the locks that agentds on this host share."""
    return Path(os.environ.get("AGENTD_RUN_DIR") or "/run/agentd")


def lock_folder(state_dir: Path) -> Path:
    """Return the folder of the locks on node ids, which the daemons of this user share.

    That of a user is private: nobody else can block a node id. Without a runtime folder and a home
    of the user's own, it is the state folder.
    """
    uid = os.geteuid()
    if uid == 0:
        return run_folder()
    for base, name in (
        (os.environ.get("XDG_RUNTIME_DIR"), "agentd"),
        (f"/run/user/{uid}", "agentd"),
        (os.environ.get("HOME"), ".local/state/agentd"),
    ):
        with suppress(OSError):
            if base and Path(base).stat().st_uid == uid:
                return Path(base, name)
    return state_dir


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


def is_current(descriptor: int, path: Path) -> bool:
    """Return whether a path has the file of a descriptor, or may have it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError as error:
        return os_error_kind(error) is not OsErrorKind.GONE


class Locks:
    """The locks of this daemon, held until `close`."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def acquire(self, path: Path, refusal: str) -> str:
        """Lock a file, again if it was removed or replaced; return a warning, or nothing.

        Raises:
            StartRefused: another process holds it (`refusal`).
            OSError: it cannot be opened or locked.
        """
        while path not in self._descriptors or not is_current(self._descriptors[path], path):
            descriptor, warning = _open_lock_file(path)
            if descriptor is None:
                return warning
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                if not isinstance(error, BlockingIOError):  # a file system without locks
                    raise OSError(error.errno, error.strerror, str(path)) from None
                raise StartRefused(f"{refusal} (pid {holder})") from None
            if path in self._descriptors:
                os.close(self._descriptors[path])
            self._descriptors[path] = descriptor
            with suppress(OSError):  # the holder's pid is only for display
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            if warning:
                return warning
        return ""

    def close(self) -> None:
        """Remove the files and release every lock."""
        while self._descriptors:
            path, descriptor = self._descriptors.popitem()
            if is_current(descriptor, path):
                with suppress(OSError):
                    path.unlink()
            os.close(descriptor)


def _open_lock_file(path: Path) -> tuple[int | None, str]:
    """Open a lock file; None with the reason if it cannot be opened."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600), ""
    except OSError as error:
        if os_error_kind(error) not in (OsErrorKind.DISK, OsErrorKind.GONE):
            raise
        warning = f"cannot be written: {error.strerror}"
    with suppress(OSError):
        return os.open(path, os.O_RDONLY | flags), warning
    return None, warning
