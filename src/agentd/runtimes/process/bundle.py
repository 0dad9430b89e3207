"""The bundle of a process kernel: a folder that only agentd and root can write.

lock           held by the kernel's shim while it lives (see `shim`)
record.json    the kernel's record, written before anything starts
identity.json  pid and start time of the command and the shim, and the boot
exit.json      the exit status, written when nothing of the kernel is left
output.log     the output; older parts are output.log.1, output.log.2, …
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from agentd.core.kernel.record import MALFORMED, parse_time, required_record
from agentd.core.kernel.states import Ending
from agentd.host.processes import Proc
from agentd.runtimes.host.private_folder import PrivateFolder, names_in
from agentd.runtimes.process.shim import F_OFD_SETLK, SHIM_BYTE

LOCK, RECORD, IDENTITY, EXIT, LOG = (
    "lock", "record.json", "identity.json", "exit.json", "output.log",
)  # fmt: skip
F_OFD_GETLK = 36
"""fcntl(2), Linux: tests whether a lock is available without taking it."""
_FLOCK = "hhqqi4x"


class ShimIdentity(msgspec.Struct, frozen=True):
    """The shim's record of the kernel's command, of itself, and of the boot."""

    leader: Proc
    shim: Proc
    boot_id: str
    has_cgroup: bool
    started_at: float


@dataclass(frozen=True, slots=True)
class Bundle(PrivateFolder):
    """One bundle; `path` may have been renamed or removed."""

    @contextmanager
    def made(self, record: str) -> Iterator[int]:
        """Create the bundle and hold its lock, which a shim inherits.

        Raises:
            FileExistsError: something of that name exists.
            OSError: it cannot be created; the caller removes the remains.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)  # removed while agentd runs
        self.path.mkdir(mode=0o700)
        descriptor = self.opened(LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            taken = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, SHIM_BYTE, 1, 0)
            fcntl.fcntl(descriptor, F_OFD_SETLK, taken)
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
            descriptor = self.opened(LOCK, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0)
            answer = fcntl.fcntl(descriptor, F_OFD_GETLK, asked)
            return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
        finally:
            os.close(descriptor)

    def has_strangers(self) -> bool:
        """Return whether there are files that neither agentd nor a shim created."""
        ours = {LOCK, RECORD, IDENTITY, EXIT, LOG, f".{IDENTITY}", f".{EXIT}"}
        return any(not name.startswith(f"{LOG}.") for name in names_in(self.path) - ours)

    def record(self) -> str:
        """Return the record.

        Raises:
            RecordError: it is missing (`MissingRecordError`) or empty.
            Unreadable: it is there and cannot be read.
            OSError: a temporary failure.
        """
        return required_record(self.content(RECORD))

    def has_identity(self) -> bool:
        """Return whether the shim wrote its identity, readable or not."""
        return self.read(IDENTITY) is not None

    def identity(self) -> ShimIdentity | None:
        """Return the identity of the kernel, None if it is missing or unreadable."""
        try:
            raw = json.loads(self.read(IDENTITY) or "")
            return ShimIdentity(
                Proc(_pid(raw["pid"]), int(raw["start_time"])),
                Proc(_pid(raw["shim_pid"]), int(raw["shim_start_time"])),
                str(raw["boot_id"]),
                bool(raw["has_cgroup"]),
                parse_time(raw["started_at"]),
            )
        except MALFORMED:
            return None

    def ending(self) -> Ending | None:
        """Return how the kernel ended, None if that is missing or unreadable."""
        try:
            raw = json.loads(self.read(EXIT) or "")
            finished_at = parse_time(raw["finished_at"])
            reason = str(raw.get("reason", ""))
            return Ending(int(raw["exit_code"]), bool(raw["oom_killed"]), finished_at, reason)
        except MALFORMED:
            return None


def _pid(raw: object) -> int:
    if not isinstance(raw, int) or not 0 < raw < 2**31:
        raise ValueError(f"invalid process id {raw!r}")
    return raw
