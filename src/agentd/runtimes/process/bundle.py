"""The bundle of a process kernel: a folder that only agentd and root can write.

lock           held by the kernel's shim while it lives (see `shim`)
record.json    the kernel's record, written before anything starts
identity.json  pid and start time of the command and the shim, and the boot
exit.json      the exit status, written when nothing of the kernel is left
descendants.json   processes of a kernel without a cgroup that it has left to its shim
output.log.0   the output from its first byte; further files begin at the position in their name
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated

import msgspec

from agentd.core.kernel.record import LAST_SECOND, RecordError, parse_time, require_record
from agentd.core.kernel.states import Ending
from agentd.host.processes import Proc
from agentd.runtimes.host.private_folder import (
    TRASH,
    PrivateFolder,
    Unreadable,
    errors_as_unreadable,
    list_names,
)
from agentd.runtimes.process.shim import DESCENDANTS, SHIM_BYTE, lock_byte

LOCK, RECORD, IDENTITY, EXIT, LOG_PREFIX = (
    "lock", "record.json", "identity.json", "exit.json", "output.log.",
)  # fmt: skip
F_OFD_GETLK = 36
"""fcntl(2), Linux: tests whether a lock is available without taking it."""
_FLOCK = "hhqqi4x"
Pid = Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
Timestamp = Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]


class ShimIdentity(msgspec.Struct, frozen=True):
    """The content of identity.json: the kernel's command, the shim, and the boot.

    Without `kernel_id` it is of an earlier version.
    """

    pid: Pid
    start_time: int
    boot_id: str
    shim_pid: Pid
    shim_start_time: int
    has_cgroup: bool
    started_at: Timestamp
    kernel_id: str = ""

    @property
    def leader(self) -> Proc:
        """The process of the command."""
        return Proc(self.pid, self.start_time)

    @property
    def shim(self) -> Proc:
        """The process of the shim."""
        return Proc(self.shim_pid, self.shim_start_time)


class Bundle(PrivateFolder, frozen=True):
    """One bundle; `path` may have been renamed or removed."""

    @contextmanager
    def create(self, record: str) -> Iterator[int]:
        """Create the bundle and hold its lock, which a shim inherits.

        Raises:
            FileExistsError: something of that name exists.
            OSError: it cannot be created; the caller removes the remains.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)  # removed while agentd runs
        self.path.mkdir(mode=0o700)
        descriptor = self.open_file(LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            lock_byte(descriptor, SHIM_BYTE)
            self.write(RECORD, record)
            yield descriptor
        finally:
            os.close(descriptor)

    def is_locked(self, byte: int) -> bool:
        """Return whether a byte of the lock is held, `SHIM_BYTE` or `COMMAND_BYTE`.

        A user who may read the file can take read locks, which do not count.

        Raises:
            Unreadable: the lock or the bundle is there and cannot be used.
            OSError: a temporary failure.
        """
        try:
            descriptor = self.open_file(LOCK, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            request = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0)
            with errors_as_unreadable(self.path / LOCK):
                answer = fcntl.fcntl(descriptor, F_OFD_GETLK, request)
            return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
        finally:
            os.close(descriptor)

    def has_foreign_files(self) -> bool:
        """Return whether there are files that neither agentd nor a shim created."""
        names = {name.removeprefix(".") for name in list_names(self.path)}
        foreign = names - {LOCK, RECORD, IDENTITY, EXIT, DESCENDANTS}
        return any(not name.startswith(LOG_PREFIX) for name in foreign)

    def read_record(self) -> str:
        """Return the record.

        Raises:
            RecordError: it is missing (`MissingRecordError`) or empty.
            Unreadable: it is there and cannot be read.
            OSError: a temporary failure.
        """
        return require_record(self.read_strict(RECORD))

    def read_identity(self) -> ShimIdentity | None:
        """Return the identity of the kernel, None if it is missing, unreadable or another's."""
        identity = self.read_json(IDENTITY, ShimIdentity)
        kernel_id = self.path.name.removeprefix(TRASH)
        return identity if identity and identity.kernel_id in ("", kernel_id) else None

    def read_ending(self) -> Ending | None:
        """Return how the kernel ended, None if that is missing or damaged.

        A shim that could write the status and not rename its file has left it under the other name.

        Raises:
            Unreadable: it is there and cannot be read.
        """
        text = self.read_strict(EXIT)
        with suppress(msgspec.DecodeError, RecordError):
            content = self.read(f".{EXIT}") if text is None else text
            ending = msgspec.json.decode(content or "", type=Ending)
            parse_time(ending.finished_at)
            return ending
        return None

    def read_descendants(self) -> list[Proc]:
        """Return the noted processes of the kernel beside its command.

        Raises:
            Unreadable: they are noted and cannot be read, or are damaged.
            OSError: a temporary failure.
        """
        text = self.read_strict(DESCENDANTS)
        try:
            return [] if text is None else msgspec.json.decode(text, type=list[Proc])
        except msgspec.DecodeError:
            raise Unreadable(errno.EBADMSG, "is damaged", str(self.path / DESCENDANTS)) from None

    def write_descendants(self, processes: Sequence[Proc]) -> None:
        """Note processes in place of a shim that was killed, as far as the disk permits."""
        with suppress(OSError):
            self.replace(DESCENDANTS, msgspec.json.encode(processes).decode())
