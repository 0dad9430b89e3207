"""The output of a process kernel, copied by its shim; part of that program, so few imports."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHUNK = 64 * 1024
MAX_GAPS = 16
"""Maximum files beside those of full size: every gap in the log begins one."""
RETRY_PAUSE_S = 0.1


class KernelOutput:
    """A pipe for the kernel's output, and log files of bounded size.

    The kernel has no file of its log, so it cannot make one sparse or endless. A file's name has
    the position of its first byte: the bytes that the kernel has printed before. Output that cannot
    be written (a full disk) is dropped, so the kernel never blocks; it counts, and so leaves a gap
    before the next file. The files are in the working folder.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        if request["user"]:
            os.fchown(self.writer, request["user"]["uid"], -1)  # the kernel may open /dev/stderr
        self._prefix = request["log_prefix"]
        self._max_size, self._max_files = request["log_max_size"], request["log_max_files"]
        self._position, self._file, self._retry_at = 0, -1, 0.0
        self._sizes: dict[int, int] = {}  # of each file, by its position, the oldest first
        self._begin_file()

    def copy_chunk(self) -> int:
        """Copy the pipe's content to the files; return the bytes copied, 0 if empty or closed."""
        try:
            chunk = os.read(self.reader, CHUNK)
        except OSError:
            return 0
        end = self._position + len(chunk)
        try:
            if self._retry_at <= time.monotonic():
                self._write(chunk)
        except OSError:
            self._retry_at = time.monotonic() + RETRY_PAUSE_S
        self._position = end
        return len(chunk)

    def _write(self, unwritten: bytes) -> None:
        while unwritten:
            begin = next(reversed(self._sizes))
            size = self._sizes[begin]
            if size >= self._max_size or begin + size != self._position:
                self._begin_file()
                begin, size = self._position, 0
            written = os.write(self._file, unwritten[: self._max_size - size])
            self._sizes[begin] += written
            self._position += written
            unwritten = unwritten[written:]

    def _begin_file(self) -> None:
        """Begin a file at the current position, in place of an empty one; drop the oldest."""
        self._drop_oldest()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        previous, self._file = self._file, os.open(self._prefix + str(self._position), flags, 0o600)
        newest = next(reversed(self._sizes), -1)
        self._sizes[self._position] = 0
        if previous >= 0:
            os.close(previous)
            if not self._sizes[newest]:
                self._drop(newest)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Make room for a full file; the newest stays, because it says where the log ends."""
        while len(self._sizes) > 1 and (
            sum(self._sizes.values()) > (self._max_files - 1) * self._max_size
            or len(self._sizes) > self._max_files + MAX_GAPS
        ):
            self._drop(next(iter(self._sizes)))

    def _drop(self, begin: int) -> None:
        del self._sizes[begin]
        os.unlink(self._prefix + str(begin))
