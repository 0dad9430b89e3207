"""The output of a process kernel, copied by its shim; part of that program, so few imports."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHUNK = 64 * 1024


class KernelOutput:
    """A pipe for the kernel's output, and log files of bounded size.

    The kernel has no file of its log, so it cannot make one sparse or endless. Output that cannot
    be written (a full disk) is dropped, so the kernel never blocks. The files are in the working
    folder.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        if request["user"]:
            os.fchown(self.writer, request["user"]["uid"], -1)  # the kernel may open /dev/stderr
        self._path = request["log_name"]
        self._max_size, self._max_files = request["log_max_size"], request["log_max_files"]
        self._open(os.O_EXCL)

    def _open(self, flags: int) -> None:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._file).st_size

    def copy_chunk(self) -> int:
        """Copy the pipe's content to the files; return the bytes copied, 0 if empty or closed."""
        try:
            chunk = os.read(self.reader, CHUNK)
        except OSError:
            return 0
        unwritten = chunk
        try:
            while unwritten:
                if self._size >= self._max_size:
                    self._rotate()
                part = unwritten[: self._max_size - self._size]
                written = os.write(self._file, part)
                self._size += written
                unwritten = unwritten[written:]
        except OSError:
            pass
        return len(chunk)

    def _rotate(self) -> None:
        """Start a new file and drop the oldest; if that fails, drop this file's content."""
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
