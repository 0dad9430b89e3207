"""What a process kernel prints, taken by its shim: part of that program, so it imports little."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHUNK = 64 * 1024


class Output:
    """What the kernel prints: a pipe, and files of which none grows beyond its size.

    The kernel never has a file of its log, so it can make none sparse or endless. What cannot be
    written (a full disk) is dropped: the kernel is never held up.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        if order["user"]:
            os.fchown(self.writer, order["user"]["uid"], -1)  # so that it can open /dev/stderr
        self._path = os.path.join(order["folder"], order["log_name"])
        self._max_size, self._max_files = order["log_max_size"], order["log_max_files"]
        self._open(os.O_EXCL)

    def _open(self, flags: int) -> None:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._file).st_size

    def take(self) -> int:
        """Move what is in the pipe into the files; return how much, 0 at its end or if empty."""
        try:
            chunk = os.read(self.reader, CHUNK)
        except OSError:
            return 0
        rest = chunk
        try:
            while rest:
                if self._size >= self._max_size:
                    self._rotate()
                part = rest[: self._max_size - self._size]
                written = os.write(self._file, part)
                self._size += written
                rest = rest[written:]
        except OSError:
            pass
        return len(chunk)

    def _rotate(self) -> None:
        """Begin a new file, and let go of the oldest; where that fails, of this one's content."""
        try:
            if self._max_files == 1:
                raise OSError
            for number in range(self._max_files - 1, 1, -1):
                older = "%s.%d" % (self._path, number - 1)
                if os.path.exists(older):
                    os.replace(older, "%s.%d" % (self._path, number))
            os.replace(self._path, self._path + ".1")
            full = self._file
            self._open(os.O_EXCL)
            os.close(full)
        except OSError:
            os.ftruncate(self._file, 0)
            self._size = 0
