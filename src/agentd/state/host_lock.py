"""The lock of a host: one agentd serves its real accelerators.

`host.lock` has one line, `{"node_id", "pid", "boot_id"}`, and is locked while that agentd runs. The
line stays when the process ends, since its kernels and claims continue to use accelerators. Only a
stop that leaves neither of them empties it. An agentd that starts meanwhile withholds its
accelerators, and never takes over. Nor does one that finds another's lock after its own file was
removed. A user's agentd only reads the line, and withholds them while there is one.

Every local user can lock a file that every local user can read (flock(2) takes any descriptor), so
only the locks of root and of this process's own user count.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from agentd.core.conditions import Condition
from agentd.core.names import is_name
from agentd.procfs import read_lines, read_uids
from agentd.state.locks import is_current
from agentd.tomlfile.regular_files import MissingFile, UnusableFile, read_regular

LOCK_TIMEOUT_S = 1.0
"""Seconds to wait for the lock: another agentd holds it for a moment while it decides."""
RETRY_PAUSE_S = 0.01
POLL_PAUSE_S = 2.0
"""Seconds between two readings."""
_MAX_BYTES = 4096


class _Line(msgspec.Struct):
    """The content of the file."""

    node_id: str
    pid: int
    boot_id: str


class HostLock:
    """The lock as one agentd sees it.

    `reason` explains why it withholds real accelerators, and is empty if it serves them.
    """

    def __init__(self, folder: Path, node_id: str, boot_id: str, *, is_unprivileged: bool) -> None:
        self.is_unprivileged = is_unprivileged
        self._path = folder / "host.lock"
        self._own_line = _Line(node_id, os.getpid(), boot_id)
        self._descriptor: int | None = None
        self._write_error = ""
        self._may_be_in_use = False
        """Whether kernels or claims of this node may use real accelerators."""
        self.reason = ""

    async def acquire(self) -> None:
        """Lock the file and write the line, unless another agentd serves the host."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not self.is_unprivileged and not self._try_lock():
            self.read()
            if not self.reason and time.monotonic() > deadline:
                self.reason = f"another process has locked {self._path}"
            if self.reason:
                return
            await asyncio.sleep(RETRY_PAUSE_S)
        self._may_be_in_use |= self.read()
        if self.reason:
            self._close()
        elif self._descriptor is not None:
            self._write(self._descriptor)

    def read(self) -> bool:
        """Read the line, and update the reason; return whether it is this node's, of this boot."""
        self.reason = ""
        try:
            line = _parse_line(read_regular(self._path, _MAX_BYTES, follows_links=False).content)
        except MissingFile:
            return False
        except UnusableFile as error:
            self.reason = f"{self._path} {error}; delete it if no other agentd is on this host"
            return False
        if line is None or line.boot_id != self._own_line.boot_id:
            return False
        if self.is_unprivileged or line.node_id != self._own_line.node_id:
            self.reason = f"served by agentd {line.node_id} (pid {line.pid}; see {self._path})"
        return not self.reason

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Read the line repeatedly, as a user's agentd does, or keep the lock, until cancelled."""
        while True:
            await asyncio.sleep(POLL_PAUSE_S)
            before = self.reason
            if self.is_unprivileged:
                self.read()
            elif not self.reason and not self._is_locked():
                self._close()
                await self.acquire()
            if self.reason != before:
                on_change()

    def conditions(self) -> Iterator[Condition]:
        """Yield the conditions about other agentds on this host."""
        if self.reason:
            reason = f"cores and memory are shared with another agentd: {self.reason}"
            yield Condition("host", reason)
        if self._write_error:
            reason = f"{self._path} cannot be written: {self._write_error}"
            yield Condition(
                "host", f"{reason}; another agentd on this host can serve the same accelerators"
            )

    def set_in_use(self, *, is_used: bool, is_known: bool) -> None:
        """Note whether kernels or claims use real accelerators; unknown kernels may do so still."""
        self._may_be_in_use = is_used or (self._may_be_in_use and not is_known)

    def release(self) -> None:
        """Release the lock, and empty the file if no real accelerator is used."""
        if self._descriptor is not None and not self._may_be_in_use:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        self._close()

    def _is_locked(self) -> bool:
        return self._descriptor is not None and is_current(self._descriptor, self._path)

    def _try_lock(self) -> bool:
        """Return False if another process has locked the file; True if it cannot be opened."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._write_error = ""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, flags, 0o644)
        except OSError as error:
            self._write_error = error.strerror or str(error)
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if _is_locked_by_others(self._descriptor):
                return True
            self._close()
            return False
        return True

    def _write(self, descriptor: int) -> None:
        text = msgspec.json.encode(self._own_line) + b"\n"
        try:
            os.fchmod(descriptor, 0o644)  # users' agentds read it, whatever the umask is
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
        except OSError as error:
            self._write_error = error.strerror or str(error)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_locked_by_others(descriptor: int) -> bool:
    """Return whether /proc/locks shows that only users without a right to the file have locked it.

    A lock that it does not show is that of another pid namespace, and counts.
    """
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    holders = [
        int(words[4])
        for words in (line.split() for line in read_lines("/proc/locks"))
        if words[1] == "FLOCK" and words[5] == f"{device}:{status.st_ino}"
    ]
    trusted = {0, os.geteuid()}
    return bool(holders) and not any(
        (uids := read_uids(pid)) and uids <= trusted for pid in holders
    )


def _parse_line(content: bytes) -> _Line | None:
    """Return the line of a file, None if the file is empty.

    Raises:
        UnusableFile: the line is damaged.
    """
    text = content.partition(b"\n")[0].strip()
    if not text:
        return None
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.MsgspecError, RecursionError):
        raise UnusableFile("is damaged") from None
    if not is_name(line.node_id):
        raise UnusableFile("is damaged")
    return line
