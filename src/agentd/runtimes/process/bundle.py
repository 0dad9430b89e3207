"""The bundle of a process kernel: its folder, mode 0700, in which only agentd and root can write.

    lock           held by the kernel's shim for as long as that lives (see `shim`)
    record.json    the kernel's record, written before anything starts
    identity.json  pid and start time of the command and the shim, and the boot
    exit.json      how it ended, written when nothing of it is left
    output.log     what it printed; older parts are output.log.1, output.log.2, …

Nothing here is opened through a symbolic link, nothing is read beyond a bound, and a folder that
somebody else could have made is not a bundle. What cannot be looked at (no file descriptor, no
memory) is raised as OSError, and proves nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agentd.core.kernel import Ending
from agentd.core.record import MALFORMED, parse_time
from agentd.host.processes import Proc
from agentd.runtimes.process.shim import F_OFD_SETLK, SHIM_BYTE

LOCK, RECORD, IDENTITY, EXIT, LOG = (
    "lock", "record.json", "identity.json", "exit.json", "output.log",
)  # fmt: skip
F_OFD_GETLK = 36
"""fcntl(2), Linux: tests whether a lock could be taken, without taking it."""
_FLOCK = "hhqqi4x"
_MOST_BYTES = 1 << 20
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
_NO_SUCH = (FileNotFoundError, NotADirectoryError)


@dataclass(frozen=True, slots=True)
class Identity:
    """What the shim wrote down: the kernel's command, the shim itself, and the boot."""

    leader: Proc
    shim: Proc
    boot_id: str
    has_cgroup: bool
    started_at: float


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle; `path` may have been set aside or be gone."""

    path: Path

    def exists(self) -> bool:
        """Tell whether there is a folder that nobody but agentd and root can have made so."""
        try:
            return _is_private(self.path.lstat())
        except _NO_SUCH:
            return False

    def is_taken(self) -> bool:
        """Tell whether anything exists at its path."""
        return os.path.lexists(self.path)

    @contextmanager
    def made(self, record: str) -> Iterator[int]:
        """Make the bundle and hold its lock, to be inherited by a shim.

        Raises:
            FileExistsError: there is something of that name.
            OSError: it cannot be made; what was made stays to be removed.
        """
        self.path.mkdir(mode=0o700)
        descriptor = self._opened(LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            taken = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, SHIM_BYTE, 1, 0)
            fcntl.fcntl(descriptor, F_OFD_SETLK, taken)
            with os.fdopen(self._opened(RECORD, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
                file.write(record)
            yield descriptor
        finally:
            os.close(descriptor)

    def _opened(self, name: str, flags: int) -> int:
        """Open a file of the bundle.

        Raises:
            FileNotFoundError: there is no such file, or no bundle.
            OSError: it cannot be opened.
        """
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        folder = self.open_folder()
        try:
            return os.open(name, flags, 0o600, dir_fd=folder)
        finally:
            os.close(folder)

    def open_folder(self) -> int:
        """Open the bundle itself; whoever calls closes it.

        Raises:
            FileNotFoundError: there is none, or what is there is no bundle.
        """
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if _is_private(os.fstat(folder)):
            return folder
        os.close(folder)
        raise FileNotFoundError(errno.ENOENT, "not a bundle", str(self.path))

    def is_locked(self, byte: int) -> bool:
        """Tell whether somebody holds a byte of the lock, `SHIM_BYTE` or `COMMAND_BYTE`."""
        try:
            descriptor = self._opened(LOCK, os.O_RDONLY)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            return False
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
            answer = fcntl.fcntl(descriptor, F_OFD_GETLK, asked)
            return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
        finally:
            os.close(descriptor)

    def has_strangers(self) -> bool:
        """Tell whether there are files that neither agentd nor a shim has put there."""
        ours = {LOCK, RECORD, IDENTITY, EXIT, LOG, f".{IDENTITY}", f".{EXIT}"}
        return any(not name.startswith(f"{LOG}.") for name in names_in(self.path) - ours)

    def record(self) -> str:
        """Return the record; empty if it is missing or unreadable."""
        return self._read(RECORD) or ""

    def has_identity(self) -> bool:
        """Tell whether the shim wrote something down, readable or not."""
        return self._read(IDENTITY) is not None

    def identity(self) -> Identity | None:
        """Return who the kernel is; None if that is not written, or cannot be read."""
        try:
            raw = json.loads(self._read(IDENTITY) or "")
            return Identity(
                Proc(_pid(raw["pid"]), int(raw["start_time"])),
                Proc(_pid(raw["shim_pid"]), int(raw["shim_start_time"])),
                str(raw["boot_id"]),
                bool(raw["has_cgroup"]),
                parse_time(raw["started_at"]),
            )
        except MALFORMED:
            return None

    def ending(self) -> Ending | None:
        """Return how the kernel ended; None if that is not written, or cannot be read."""
        try:
            raw = json.loads(self._read(EXIT) or "")
            finished_at = parse_time(raw["finished_at"])
            return Ending(int(raw["exit_code"]), bool(raw["oom_killed"]), finished_at)
        except MALFORMED:
            return None

    def _read(self, name: str) -> str | None:
        """Return a file's text, empty if it cannot be read; None if there is no such file.

        Raises:
            OSError: that cannot be told now.
        """
        try:
            descriptor = self._opened(name, os.O_RDONLY | os.O_NONBLOCK)
        except _NO_SUCH:
            return None
        except OSError as error:
            if error.errno in _PASSING:
                raise
            return ""
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return ""
            return os.read(descriptor, _MOST_BYTES).decode(errors="replace")
        except OSError as error:
            if error.errno in _PASSING:
                raise
            return ""
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the folder and its content, or whatever else is in its place."""
        with suppress(*_NO_SUCH):
            if stat.S_ISDIR(self.path.lstat().st_mode):
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                self.path.unlink()


def _pid(raw: object) -> int:
    if not isinstance(raw, int) or not 0 < raw < 2**31:
        raise ValueError(f"invalid process id {raw!r}")
    return raw


def _is_private(found: os.stat_result) -> bool:
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not stat.S_IMODE(found.st_mode) & 0o077


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder; none if there is no such folder."""
    try:
        return set(os.listdir(folder))  # noqa: PTH208 - names are what is wanted
    except _NO_SUCH:
        return set()
