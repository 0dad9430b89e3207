"""A private folder that only agentd and root can write: a runtime's bundle.

Nothing is opened through a symbolic link, nothing is read beyond a bound, and a folder that another
user could have created is not trusted. Only ENOENT proves that a folder or file does not exist. One
that is there and cannot be used is `Unreadable`. Temporary failures (no file descriptor, no memory)
raise another OSError.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from agentd.errors import RuntimeUnavailable
from agentd.os_errors import OsErrorKind, os_error_as_refusal, os_error_kind

_MAX_BYTES = 1 << 20
TRASH = ".removed-"
"""Prefix of the name of a folder that is being removed."""
T = TypeVar("T")
_OTHERS_MAY_WRITE, _OTHERS_MAY_ACCESS = 0o022, 0o077


class Unreadable(OSError):
    """A folder or a file is there and cannot be used; `strerror` has the mode or the error."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class PrivateFolder(msgspec.Struct, frozen=True):
    """One folder; `path` may have been renamed or removed."""

    path: Path

    def exists(self) -> bool:
        """Return whether there is a folder that only agentd or root can have created.

        Raises:
            Unreadable: something else is there, or it cannot be opened.
            OSError: a temporary failure.
        """
        try:
            os.close(self.open_folder())
        except FileNotFoundError:
            return False
        return True

    def is_readable(self) -> bool:
        """Return whether it exists and can be used."""
        with suppress(Unreadable):
            return self.exists()
        return False

    def exposure_problem(self) -> str:
        """Return why others can look into the folder, empty if they cannot."""
        with suppress(FileNotFoundError):  # it was removed meanwhile
            mode = stat.S_IMODE(self.path.lstat().st_mode)
            return f"{self.path}: {_mode_problem(mode)}" if mode & _OTHERS_MAY_ACCESS else ""
        return ""

    def path_exists(self) -> bool:
        """Return whether anything exists at its path.

        Raises:
            AgentdError: that is unknown.
        """
        try:
            return bool(self.path.lstat())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise os_error_as_refusal(error, str(self.path)) from error

    def open_file(self, name: str, flags: int) -> int:
        """Open a file of the folder.

        Raises:
            FileNotFoundError: the file or the folder does not exist.
            Unreadable: the file cannot be opened.
            OSError: a temporary failure.
        """
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        folder = self.open_folder()
        try:
            with errors_as_unreadable(self.path / name):
                return os.open(name, flags, 0o600, dir_fd=folder)
        finally:
            os.close(folder)

    def open_folder(self) -> int:
        """Open the folder itself; the caller closes it.

        Raises:
            FileNotFoundError: the folder does not exist.
            Unreadable: it cannot be opened, or another user could have created or written it.
            OSError: a temporary failure.
        """
        with errors_as_unreadable(self.path):
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = os.fstat(folder)
        if status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE:
            return folder
        os.close(folder)
        reason = _mode_problem(stat.S_IMODE(status.st_mode))
        if status.st_uid != os.geteuid():
            reason = f"belongs to user {status.st_uid}, expected {os.geteuid()}"
        raise Unreadable(errno.EACCES, reason, str(self.path))

    def write(self, name: str, text: str) -> None:
        """Create a file."""
        descriptor = self.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)

    def replace(self, name: str, text: str) -> None:
        """Create or replace a file atomically."""
        temporary = self.path / f".{name}"
        temporary.unlink(missing_ok=True)
        self.write(temporary.name, text)
        temporary.replace(self.path / name)

    def read(self, name: str) -> str | None:
        """Return a file's text, empty if it is unreadable, None if it does not exist.

        Raises:
            OSError: a temporary failure.
        """
        try:
            return self.read_strict(name)
        except Unreadable:
            return ""

    def read_strict(self, name: str) -> str | None:
        """Return a file's text, None if it does not exist.

        Raises:
            Unreadable: it is there and cannot be read.
            OSError: a temporary failure.
        """
        try:
            descriptor = self.open_file(name, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        path = self.path / name
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable(errno.EINVAL, "is not a regular file", str(path))
            with errors_as_unreadable(path):
                raw = os.read(descriptor, min(status.st_size, _MAX_BYTES))
        finally:
            os.close(descriptor)
        return raw.decode(errors="replace")

    def read_json(self, name: str, type_: type[T]) -> T | None:
        """Return the value in a file, None if it is missing, unreadable or damaged."""
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(self.read(name) or "", type=type_)
        return None

    def remove(self) -> None:
        """Remove the folder and its content, or whatever is in its place."""
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(self.path.lstat().st_mode):
                with suppress(PermissionError):  # of another owner
                    self.path.chmod(0o700)
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                self.path.unlink()


def _mode_problem(mode: int) -> str:
    return f"has mode {mode:04o}, expected 0700"


@contextmanager
def errors_as_unreadable(path: Path) -> Iterator[None]:
    """Raise `Unreadable` if a path is there, or may be, and cannot be used."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        if os_error_kind(error) is OsErrorKind.PASSING:
            raise
        raise Unreadable(error.errno, error.strerror, str(path)) from None


def list_names(folder: Path) -> set[str]:
    """Return the names in a folder, none if it does not exist."""
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()


@contextmanager
def os_errors_as_unavailable() -> Iterator[None]:
    """Raise `RuntimeUnavailable` if processes or folders cannot be inspected."""
    try:
        yield
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        reason = f"cannot inspect processes and folders: {path}{error.strerror}"
        raise RuntimeUnavailable(reason) from error
